//! `wg-agent cleanup`: takes everything of the agent off a node on which none runs. What stays is the key, which is the
//! node's identity, and whatever is not ours.

use std::{io, os::unix::net::UnixStream, path::Path, time::SystemTime};

use clustermesh_agent_core::interface::InterfaceName;
use clustermesh_api::names::{KILO_LAST_SEEN, NODE_AGENT};
use k8s_openapi::api::core::v1::Node;
use kube::Api;

use crate::{
    args::{CleanupConfig, ModeFlag},
    cache, device,
    firewall::{Keeper, Nft, Stamp},
    identity::{caller, key},
    lock, publish,
    reconcile::gate,
    route::{self, Netlink},
    run::lines,
    source::client,
};

/// Where userspace devices put their control sockets.
const CONTROL_DIRECTORY: &str = "/var/run/wireguard";

/// Cleans up, carrying on past failures; returns all of them.
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
    let kg_lives = match (&node_name, mode) {
        (Some(node), ModeFlag::Full) => kg_lives(kubeconfig.as_deref(), node).await,
        _ => false,
    };
    if kg_lives {
        tracing::warn!(
            "kg (Kilo) serves this node: the interface, its addresses and Kilo's annotations are kg's and stay"
        );
    }
    match mode {
        ModeFlag::Full => tunnel(&interface, kg_lives, &key_file, &mut failures).await,
        ModeFlag::Policy | ModeFlag::Gateway => {
            tracing::info!(%interface, "policy mode: the interface, its routes and Kilo's annotations are kg's")
        }
    }
    if let Err(error) = Keeper::new(Nft::default()).destroy().await {
        failures.push(format!("firewall: {error}"));
    }
    failures.extend(cache::remove(&cache_file).iter().map(ToString::to_string));
    if let Err(error) = Stamp::beside(&cache_file).remove() {
        failures.push(format!("what is remembered of the firewall: {error}"));
    }
    match node_name {
        None => tracing::info!("--node-name is not given: the Node's annotations stay"),
        Some(node) => {
            if let Err(error) = annotations(kubeconfig.as_deref(), &node, kg_lives || mode == ModeFlag::Policy).await {
                failures.push(format!("annotations of Node {node}: {error}"));
            }
        }
    }
    anyhow::ensure!(
        failures.is_empty(),
        "not everything could be removed:\n{}",
        lines(&failures)
    );
    tracing::info!("nothing of wg-agent is left on this node but its key");
    Ok(())
}

/// Takes away what carries the tunnel; what cannot be is added to `failures`. `kg_lives`: the interface is kg's, even one
/// that this agent made once.
async fn tunnel(interface: &InterfaceName, kg_lives: bool, key_file: &Path, failures: &mut Vec<String>) {
    // Addresses are only ours on a device of ours. Under a name that nothing has, no address is found.
    let removed = if kg_lives {
        Ok(false)
    } else {
        device::userspace::remove_interface(interface.as_str())
    };
    let device = match removed {
        Ok(true) => interface.clone(),
        Ok(false) => {
            tracing::warn!(%interface, "interface is not this agent's: left alone, with its addresses");
            unused()
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
    if let Err(error) = remove_socket(&Path::new(CONTROL_DIRECTORY).join(format!("{interface}.sock"))) {
        failures.push(format!("control socket: {error}"));
    }
    if let Err(error) = caller::remove().await {
        failures.push(format!("rule of a change of key: {error}"));
    }
    let next = key::next(key_file);
    match std::fs::remove_file(&next) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => failures.push(format!("{}: {error}", next.display())),
        _ => {}
    }
}

/// A name that no interface has: 15 characters which nobody would type.
fn unused() -> InterfaceName {
    match "no.such.device@".parse() {
        Ok(name) => name,
        Err(_) => unreachable!("15 characters of those that are taken"),
    }
}

/// Removes a socket at which nobody listens.
fn remove_socket(path: &Path) -> io::Result<()> {
    match UnixStream::connect(path) {
        Ok(_) => {
            tracing::warn!(socket = %path.display(), "another program answers there: left alone");
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(_) => std::fs::remove_file(path),
    }
}

/// Whether kg checked in on this Node of late. Where the API server does not say, its annotations cannot be removed either.
async fn kg_lives(kubeconfig: Option<&Path>, node: &str) -> bool {
    let Ok(connection) = client::connect(kubeconfig).await else {
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
            seen.is_some_and(|seen| gate::is_alive(seen, SystemTime::now()).is_some())
        }
        Err(error) => {
            tracing::debug!(%error, "cannot read the Node");
            false
        }
    }
}

/// Removes this agent's annotations; `kg` = those in Kilo's own names are kg's and stay.
async fn annotations(kubeconfig: Option<&Path>, node: &str, kg: bool) -> Result<(), String> {
    let connection = client::connect(kubeconfig).await.map_err(|e| e.to_string())?;
    let mut gone = publish::identity::removal();
    if kg {
        gone.retain(|key, _| *key == NODE_AGENT);
    }
    publish::write(&connection.client, node, &gone).await
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_a_socket_that_nobody_answers_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kilo0.sock");
        remove_socket(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        remove_socket(&path).unwrap();
        assert!(path.exists());
        drop(listener);
        remove_socket(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn the_unused_name_is_a_name() {
        assert_eq!(unused().as_str().len(), 15);
    }
}
