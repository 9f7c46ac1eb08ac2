//! Implements `wg-agent cleanup`: removes the state of the agent from a node on which no agent runs. The key stays
//! because it is the node's identity. Kernel settings (sysctls) and the state of other programs stay too.

use std::{io, path::Path, time::SystemTime};

use clustermesh_agent_core::interface::InterfaceName;
use clustermesh_api::names::{KILO_LAST_SEEN, NODE_AGENT};
use k8s_openapi::api::core::v1::Node;
use kube::Api;

use crate::{
    args::{CleanupConfig, ModeFlag},
    cache,
    device::{self, DeviceError},
    firewall::{FirewallManager, Nft, TableRecord},
    identity::{initiation_listener, key},
    lock, publish,
    reconcile::preconditions,
    route::{self, Netlink},
    run::bullet_list,
    source::client,
};

/// Removes the state. Continues after a failure, and returns all failures together.
pub async fn run(config: CleanupConfig) -> anyhow::Result<()> {
    let CleanupConfig {
        node_name,
        kubeconfig,
        mode,
        interface,
        key_file,
        cache_file,
    } = config;
    anyhow::ensure!(
        mode != ModeFlag::Gateway,
        "a gateway leaves nothing on a node: delete its StatefulSet (kubectl delete -f deploy/gateway.yaml)"
    );
    let _lock = lock::take()?;
    let mut failures: Vec<String> = Vec::new();
    let node_name = node_name.filter(|name| !name.is_empty());
    let is_kg_alive = match (&node_name, mode) {
        (Some(node), ModeFlag::Full) => is_kg_alive(kubeconfig.as_deref(), node).await,
        _ => false,
    };
    if is_kg_alive {
        tracing::warn!(
            "kg (Kilo) serves this node: the interface, its addresses and Kilo's annotations belong to kg and stay"
        );
    }
    match mode {
        ModeFlag::Full => remove_tunnel(&interface, is_kg_alive, &key_file, &mut failures).await,
        ModeFlag::Policy | ModeFlag::Gateway => {
            tracing::info!(%interface, "policy mode: the interface, its routes and Kilo's annotations belong to kg")
        }
    }
    if let Err(error) = FirewallManager::new(Nft::default()).destroy().await {
        failures.push(format!("firewall: {error}"));
    }
    failures.extend(cache::remove(&cache_file).iter().map(ToString::to_string));
    if let Err(error) = TableRecord::next_to_cache(&cache_file).remove() {
        failures.push(format!("the record of the firewall table: {error}"));
    }
    match node_name {
        None => tracing::info!("--node-name is not given: the Node's annotations stay"),
        Some(node) => {
            if let Err(error) =
                remove_annotations(kubeconfig.as_deref(), &node, is_kg_alive || mode == ModeFlag::Policy).await
            {
                failures.push(format!("annotations of Node {node}: {error}"));
            }
        }
    }
    anyhow::ensure!(
        failures.is_empty(),
        "not everything could be removed:\n{}",
        bullet_list(&failures)
    );
    tracing::info!("nothing of wg-agent is left on this node but its key");
    Ok(())
}

/// Removes the device, its routes and the state of a key rotation, and adds errors to `failures`. If `is_kg_alive`, kg
/// uses the interface, so it stays even if this agent created it.
async fn remove_tunnel(interface: &InterfaceName, is_kg_alive: bool, key_file: &Path, failures: &mut Vec<String>) {
    // `remove_interface` removes the interface of either backend, kernel or userspace.
    // `route::cleanup` removes the addresses of the interface `device`. If the interface is not the agent's or is in use by kg,
    // its addresses must stay, so `device` is then a name that no interface has.
    let removed = if is_kg_alive {
        Ok(false)
    } else {
        device::userspace::remove_interface(interface.as_str())
    };
    let device = match removed {
        Ok(true) => interface.clone(),
        Ok(false) => {
            tracing::warn!(%interface, "the interface belongs to another program: it stays, with its addresses");
            unused_interface_name()
        }
        Err(error) => {
            failures.push(format!("device: {error}"));
            interface.clone()
        }
    };
    match Netlink::open(device) {
        Ok(mut routing) => failures.extend(
            route::cleanup(&mut routing)
                .await
                .iter()
                .map(|e| format!("routes: {e}")),
        ),
        Err(error) => failures.push(format!("routes: {error}")),
    }
    if let Err(error) = except_in_use(device::userspace::remove_control_socket(interface.as_str())) {
        failures.push(format!("control socket: {error}"));
    }
    if let Err(error) = initiation_listener::remove().await {
        failures.push(format!("nftables table of a key rotation: {error}"));
    }
    let next = key::next_path(key_file);
    match std::fs::remove_file(&next) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => failures.push(format!("{}: {error}", next.display())),
        _ => {}
    }
}

/// A valid interface name that no program uses.
fn unused_interface_name() -> InterfaceName {
    match "no.such.device@".parse() {
        Ok(name) => name,
        Err(_) => unreachable!("a valid interface name"),
    }
}

/// Ignores the error that another program listens on the control socket: the socket stays, because it is not the agent's.
fn except_in_use(removed: Result<(), DeviceError>) -> Result<(), DeviceError> {
    match removed {
        Err(DeviceError::ControlSocket { path, source }) if source.kind() == io::ErrorKind::AddrInUse => {
            tracing::warn!(socket = %path.display(), "another program listens on this control socket: it stays");
            Ok(())
        }
        removed => removed,
    }
}

/// Whether kg is alive on this Node; `false` also if the API server does not answer.
async fn is_kg_alive(kubeconfig: Option<&Path>, node: &str) -> bool {
    let Ok(connection) = client::build(kubeconfig).await else {
        return false;
    };
    let nodes: Api<Node> = Api::all(connection.client);
    match nodes.get_metadata(node).await {
        Ok(node) => {
            let seen = node
                .metadata
                .annotations
                .as_ref()
                .and_then(|all| all.get(KILO_LAST_SEEN));
            let seen = seen.and_then(|text| text.parse().ok());
            seen.is_some_and(|seen| preconditions::age_if_alive(seen, SystemTime::now()).is_some())
        }
        Err(error) => {
            tracing::debug!(%error, "cannot read the Node");
            false
        }
    }
}

/// Removes this agent's annotations. All except [`NODE_AGENT`] have Kilo's names; with `keep_kilo` these belong to kg and stay.
async fn remove_annotations(kubeconfig: Option<&Path>, node: &str, keep_kilo: bool) -> Result<(), String> {
    let connection = client::build(kubeconfig).await.map_err(|e| e.to_string())?;
    let mut removal = publish::identity::removal();
    if keep_kilo {
        removal.retain(|key, _| *key == NODE_AGENT);
    }
    publish::write(&connection.client, node, &removal).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_socket_of_another_program_is_no_failure() {
        let failed = |kind: io::ErrorKind| {
            except_in_use(Err(DeviceError::ControlSocket {
                path: "kilo0.sock".into(),
                source: kind.into(),
            }))
        };
        assert!(failed(io::ErrorKind::AddrInUse).is_ok());
        assert!(failed(io::ErrorKind::PermissionDenied).is_err());
    }

    #[test]
    fn unused_name_is_a_valid_interface_name() {
        // An invalid name panics.
        assert_eq!(unused_interface_name().as_str().len(), 15);
    }
}
