"""HTML pages of ``nostall characterize``: one file with inline SVG that needs no network."""
