"""The methods by their names; a new one is a file here, and a line."""

from runtime.reuse.fusion.methods.a3 import A3
from runtime.reuse.fusion.methods.cacheblend import CacheBlend
from runtime.reuse.fusion.methods.full import Full
from runtime.reuse.fusion.methods.legolink import LegoLink
from runtime.reuse.fusion.methods.method import Method
from runtime.reuse.fusion.methods.pie import Pie
from runtime.reuse.fusion.methods.prophetkv import ProphetKV

METHODS: dict[str, type[Method]] = {method.name: method for method in (A3, CacheBlend, ProphetKV, LegoLink, Pie, Full)}
