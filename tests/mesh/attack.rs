//! What the administrator of a sandbox does who wants more than was given: takes the controller's rights away, and gives the
//! Peers there every address.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use clustermesh_lab::{Cluster, Lab, wait_until};
use ipnet::IpNet;
use serde_json::{Value, json};

use super::{PATIENCE, json as get};

/// Every socket of these clusters but those that the sandbox has itself, and those that lie in its own pods' range, which no node
/// of its leads elsewhere; what stands there for another cluster's counts as that one's.
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
    let plan = sandbox.plan();
    let mut pods = vec![IpNet::from(plan.pod_cidr)];
    pods.extend(plan.v6.iter().map(|v6| IpNet::from(v6.pod_cidr)));
    let outside = |ip: &IpAddr| !own.contains(ip) && !pods.iter().any(|net| net.contains(ip));
    all.retain(|socket, _| outside(&socket.ip()) || granted.contains(&socket.ip()));
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
    /// The controller's rights there.
    rights: String,
    /// The Peers that the controller wrote there.
    pub(crate) peers: Vec<String>,
}

impl<'a> Attacker<'a> {
    /// From here on the controller writes nothing there. `node` = the sandbox's only one.
    pub(crate) async fn new(lab: &'a Lab, sandbox: &'a Cluster<'a>, node: &str) -> Self {
        let [binding, name] = ["clusterrolebinding", "clustermesh-member"];
        let mut rights = get(sandbox, &["get", binding, name]).await;
        rights["metadata"] = json!({"name": name});
        sandbox.kubectl(["delete", binding, name]).await.unwrap();
        let peers = get(sandbox, &["get", "peers"]).await;
        let names = peers["items"].as_array().unwrap().iter();
        let peers = names.map(|peer| peer["metadata"]["name"].as_str().unwrap().to_owned());
        Self {
            lab,
            peers: peers.collect(),
            rights: rights.to_string(),
            sandbox,
            node: node.to_owned(),
        }
    }

    /// Lets the controller write there again.
    pub(crate) async fn relents(&self) {
        self.sandbox.apply(&self.rights).await.unwrap();
    }

    /// Takes a node of the other side for who it is now: its key, as its Node says.
    pub(crate) async fn follows(&self, peer: &str, key: &str) {
        let patch = json!({"spec": {"publicKey": key}}).to_string();
        let words = ["patch", "peer", peer, "--type=merge", "-p", &patch];
        self.sandbox.kubectl(words).await.unwrap();
    }

    /// Leads all of these through one Peer's node, and waits until routing does so.
    pub(crate) async fn leads_through(&self, chosen: &str, addresses: &BTreeSet<IpAddr>) {
        // First through none, so that what is seen afterwards is not what was there before.
        for name in &self.peers {
            self.gives(name, &BTreeSet::new()).await;
        }
        let led = async || {
            let carried = carried(self.lab, &self.node).await?;
            let led = addresses.iter().filter(|ip| carried.contains(&ip.to_string()));
            Ok::<_, String>(led.count())
        };
        wait_until(
            "kilo0 to carry none of these addresses",
            PATIENCE,
            async || match led().await? {
                0 => Ok(()),
                led => Err(format!("{led} addresses")),
            },
        )
        .await
        .unwrap();
        self.gives(chosen, addresses).await;
        wait_until("kilo0 to carry every address", PATIENCE, async || match led().await? {
            led if led == addresses.len() => Ok(()),
            led => Err(format!("{led} of {} addresses", addresses.len())),
        })
        .await
        .unwrap();
    }

    async fn gives(&self, peer: &str, addresses: &BTreeSet<IpAddr>) {
        let ranges = addresses.iter().map(|ip| IpNet::from(*ip).to_string());
        let patch = json!({"spec": {"allowedIPs": ranges.collect::<Vec<_>>()}}).to_string();
        let words = ["patch", "peer", peer, "--type=merge", "-p", &patch];
        self.sandbox.kubectl(words).await.unwrap();
    }
}
