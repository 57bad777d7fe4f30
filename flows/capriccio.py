"""Deployable entry point: a Capriccio experiment, new or where it stopped."""

from zeus_flows.orchestration.capriccio_flow import capriccio

if __name__ == "__main__":
    capriccio.serve(name="capriccio")
