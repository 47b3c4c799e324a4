"""What the routers of a run do: recorded, measured, drawn. The only room that draws."""
