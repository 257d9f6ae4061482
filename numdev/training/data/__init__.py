"""What models are trained on: rendered scenes with captions, a user's folder of captioned pictures, and text.

Everything random is a function of a seed and a step. Nothing here knows a model.
"""
