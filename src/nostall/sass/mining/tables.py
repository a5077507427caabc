"""x"""
def write_tables(checkpoint, out): pass
