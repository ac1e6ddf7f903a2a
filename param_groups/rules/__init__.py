"""What the papers say: exponents, each paper's numbers, and prescriptions around others."""
