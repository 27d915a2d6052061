"""The type stubs say what the extension does: names, kinds and defaults of every parameter."""

import ast
import inspect
from pathlib import Path

import pytest

import sparse_mla
from sparse_mla import _core

STUBS = ast.parse(Path(sparse_mla.__file__).with_name("_core.pyi").read_text())
FUNCTIONS = {node.name: node for node in STUBS.body if isinstance(node, ast.FunctionDef)}
CLASSES = {node.name: node for node in STUBS.body if isinstance(node, ast.ClassDef)}


def stub_parameters(node):
    """[(name, kind, default)] of a function in the stubs."""
    arguments = node.args
    required = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults))
    defaults = required + [ast.literal_eval(value) for value in arguments.defaults]
    named = [
        (argument.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
        for argument, default in zip(arguments.args, defaults, strict=True)
    ]
    keywords = [
        (
            argument.arg,
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.empty if value is None else ast.literal_eval(value),
        )
        for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return named + keywords


def test_every_function_has_a_stub():
    functions = {name for name, value in vars(_core).items() if inspect.isbuiltin(value)}
    assert functions == set(FUNCTIONS)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_signature(name):
    signature = inspect.signature(getattr(_core, name))
    actual = [(p.name, p.kind, p.default) for p in signature.parameters.values()]
    assert actual == stub_parameters(FUNCTIONS[name])


@pytest.mark.parametrize("name", ["IndexFault", "CudaError", "UnsupportedError"])
def test_exceptions(name):
    bases = [base.id for base in CLASSES[name].bases]
    assert [base.__name__ for base in getattr(_core, name).__bases__] == bases
