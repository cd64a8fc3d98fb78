"""Sizes of tutorials as the pages have them, and as large as the suite has time for."""

BRIEF = {
    "epochs=60": "epochs=3",
    "epochs=40": "epochs=3",
    "epochs=2,": "epochs=0.1,",
    "epochs=1,": "epochs=0.05,",
    "range(1500)": "range(50)",
    "tokens=500_000": "tokens=5_000",
    "tokens=250_000": "tokens=2_500",
    "2**14": "2**11",
    "layer_steps=100": "layer_steps=3",
    "pattern_steps=100": "pattern_steps=3",
    "validation[:500]": "validation[:50]",
    "sample(4000": "sample(800",
    "in range(40)": "in range(10)",
    "randn(50": "randn(5",
}
