"""Reader of Chakra execution traces, in protobuf and JSON."""
