"""Every public name says what it does, and every parameter what it takes."""

import inspect

import pytest

import sparse_mla

NAMES = [name for name in sparse_mla.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_docstring(name):
    assert len(inspect.getdoc(getattr(sparse_mla, name))) > 40


@pytest.mark.parametrize("name", [n for n in NAMES if inspect.isbuiltin(getattr(sparse_mla, n))])
def test_every_parameter_is_documented(name):
    function = getattr(sparse_mla, name)
    text = inspect.getdoc(function)
    for parameter in inspect.signature(function).parameters:
        assert parameter in text, parameter


def test_public_names_are_sorted():
    assert sorted(sparse_mla.__all__) == sparse_mla.__all__
