"""Steps of evaluation that call the model again and again, as text generation does"""
