"""The rank layout: which slice of which tensor a rank holds, written, merged, and proved."""
