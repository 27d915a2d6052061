#include "error.h"

#include <stdarg.h>
#include <stdio.h>

enum smla_status smla_fail(struct smla_error *error, enum smla_status status, const char *format,
                           ...)
{
    error->status = status;
    error->code = 0;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return status;
}
