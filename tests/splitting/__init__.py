"""Tests of splitting."""
