"""Bytes in, bytes out: ELF container, instruction words, and the vendor tools."""
