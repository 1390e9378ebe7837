"""Exchanges between ranks on emulated hosts, models larger than a device, and a cost model of larger machines."""
