"""Forebay trains DFlash drafters."""

__version__ = "0.1.0"
