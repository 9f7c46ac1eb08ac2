//! Tests what a reconciler does with a device that fails.

use clustermesh_daemon::metrics::encode;
use prometheus_client::registry::Registry;

use super::{super::device::OpenDevice, *};
use crate::device::{Memory as MemoryDevice, Opened};

/// An agent whose device is open, its metrics, and a handle to the device. It opens a new device if this one fails.
fn agent_with_device() -> (Agent, Registry, MemoryDevice, tempfile::TempDir) {
    let (mut agent, _, directory) = agent(Box::new(|_| {
        Ok(Opened {
            device: Box::new(MemoryDevice::new()),
            reason: "",
        })
    }));
    let mut registry = Registry::default();
    agent.deps.report.metrics = Metrics::register(&mut registry, false);
    let device = MemoryDevice::new();
    agent.device.open = Some(OpenDevice {
        device: Box::new(device.clone()),
        mtu: 1380,
        key: agent.deps.key.public(),
        backend_reason: "",
    });
    (agent, registry, device, directory)
}

fn counts_one_repair(registry: &Registry) -> bool {
    let text = encode(registry).unwrap();
    text.lines().any(|line| line == "repairs_total{part=\"device\"} 1")
}

#[test]
fn deleted_interface_found_before_a_pass_is_one_repair() {
    let (mut agent, registry, device, _directory) = agent_with_device();
    device.delete();
    agent.device.needs_check = true;
    assert_eq!(agent.ensure_device(1380), Ok(true), "opened again");
    assert!(counts_one_repair(&registry));
}

#[test]
fn deleted_interface_found_during_a_pass_is_one_repair() {
    let (mut agent, registry, device, _directory) = agent_with_device();
    let compiled = compile(&gathered(&snapshot()).inputs);
    device.delete();
    assert!(agent.apply_peers(&compiled).is_err());
    agent.device.needs_check = true;
    assert_eq!(agent.ensure_device(1380), Ok(true), "opened again");
    assert!(counts_one_repair(&registry));
}
