"""Loggers of the plugin: children of SGLang's, so that they come out with its handlers, format and level."""

import logging


def get_logger(module_name: str) -> logging.Logger:
    return logging.getLogger(f"sglang.{module_name}")
