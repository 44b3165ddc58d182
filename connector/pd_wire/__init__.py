"""What crosses a component boundary: names, handle keys and the proof format.

Standard library only, so that the router, the operator, pdctl and the connector (inside a foreign engine image)
can all import it. Nothing here decides anything; it is the one place where two sides must agree letter for letter.
"""
