//! What the administrator of a sandbox does who wants more than was given: takes the controller's rights away, and gives the
//! Peers there every address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_lab::{Cluster, Lab, wait_until};
use serde_json::{Value, json};

use super::{PATIENCE, json as get};

/// Every socket of these clusters but those that the sandbox has itself; what stands there for another cluster's counts as
/// that one's.
pub(crate) async fn sockets_beyond(
    sandbox: &Cluster<'_>,
    clusters: &[&Cluster<'_>],
    granted: &BTreeSet<SocketAddr>,
) -> BTreeMap<SocketAddr, String> {
    let own = sandbox.sockets().await.unwrap();
    let own: BTreeSet<IpAddr> = own.into_keys().map(|socket| socket.ip()).collect();
    let granted: BTreeSet<IpAddr> = granted.iter().map(SocketAddr::ip).collect();
    let mut all = BTreeMap::new();
    for cluster in clusters {
        all.extend(cluster.sockets().await.unwrap());
    }
    all.retain(|socket, _| !own.contains(&socket.ip()) || granted.contains(&socket.ip()));
    all
}

/// Destinations that a node leads into the tunnel, as `ip` shows them in the mesh's table.
pub(crate) async fn carried(lab: &Lab, node: &str) -> Result<BTreeSet<String>, String> {
    let mut all = BTreeSet::new();
    for family in ["-4", "-6"] {
        let words = ["ip", family, "-j", "route", "show", "table", "5182", "dev", "kilo0"];
        let output = lab
            .node(node)
            .try_exec(words)
            .await
            .map_err(|error| error.to_string())?;
        let routes: Value = serde_json::from_str(&output.stdout).unwrap_or_default();
        let routes = routes.as_array().into_iter().flatten();
        all.extend(routes.filter_map(|route| route["dst"].as_str().map(str::to_owned)));
    }
    Ok(all)
}

/// A sandbox whose administrator has turned.
pub(crate) struct Attacker<'a> {
    lab: &'a Lab,
    sandbox: &'a Cluster<'a>,
    node: String,
    /// The Peers that the controller wrote there.
    pub(crate) peers: Vec<String>,
}

impl<'a> Attacker<'a> {
    /// From here on the controller writes nothing there. `node` = the sandbox's only one.
    pub(crate) async fn new(lab: &'a Lab, sandbox: &'a Cluster<'a>, node: &str) -> Self {
        let revoke = ["delete", "clusterrolebinding", "clustermesh-member"];
        sandbox.kubectl(revoke).await.unwrap();
        let peers = get(sandbox, &["get", "peers"]).await;
        let names = peers["items"].as_array().unwrap().iter();
        let peers = names.map(|peer| peer["metadata"]["name"].as_str().unwrap().to_owned());
        Self {
            lab,
            peers: peers.collect(),
            sandbox,
            node: node.to_owned(),
        }
    }

    /// Leads all of these through one Peer's node, and waits until routing does so.
    pub(crate) async fn leads_through(&self, chosen: &str, addresses: &BTreeSet<IpAddr>) {
        for name in &self.peers {
            let ranges = addresses.iter().filter(|_| name == chosen);
            let ranges: Vec<String> = ranges.map(|ip| ipnet::IpNet::from(*ip).to_string()).collect();
            let patch = json!({"spec": {"allowedIPs": ranges}}).to_string();
            let words = ["patch", "peer", name, "--type=merge", "-p", &patch];
            self.sandbox.kubectl(words).await.unwrap();
        }
        wait_until("kilo0 to carry every address", PATIENCE, async || {
            let carried = carried(self.lab, &self.node).await?;
            let missing = addresses.iter().filter(|ip| !carried.contains(&ip.to_string()));
            match missing.collect::<Vec<_>>() {
                missing if missing.is_empty() => Ok(()),
                missing => Err(format!("without {missing:?}")),
            }
        })
        .await
        .unwrap();
    }
}
