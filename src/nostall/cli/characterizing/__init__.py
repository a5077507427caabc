"""The command ``nostall characterize``: its options and its terminal output."""
