"""Engines and reward workers in processes of their own, which Ray places on one or several machines."""
