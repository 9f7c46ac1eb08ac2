//! Acts as a malicious administrator of a sandbox: revokes the controller's rights, and gives one of the sandbox's Peers
//! the addresses of other clusters as allowed IPs. The caller then checks which sockets are reachable.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use ipnet::IpNet;
use serde_json::{Value, json};

use crate::{Cluster, Lab, Result, wait_until};

/// The routing table with the mesh's routes.
const TABLE: &str = "5182";
/// Arguments of `ip route show` that select the routes into the tunnel.
const INTO_TUNNEL: [&str; 2] = ["dev", "kilo0"];
/// How long the agent may take to change routes on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(90);

impl Cluster<'_> {
    /// Every socket of the given clusters (see [`Cluster::sockets`]) that does not belong to this cluster. Addresses in
    /// this cluster's own pod range are left out, because its nodes never route them into the tunnel. Sockets at the
    /// addresses in `granted` are always kept.
    ///
    /// # Errors
    /// When an API server does not answer.
    pub async fn foreign_sockets(
        &self,
        clusters: &[&Cluster<'_>],
        granted: &BTreeSet<SocketAddr>,
    ) -> Result<BTreeMap<SocketAddr, String>> {
        let own: BTreeSet<IpAddr> = self.sockets().await?.into_keys().map(|socket| socket.ip()).collect();
        let granted: BTreeSet<IpAddr> = granted.iter().map(SocketAddr::ip).collect();
        let mut all = BTreeMap::new();
        for cluster in clusters {
            all.extend(cluster.sockets().await?);
        }
        let plan = self.plan();
        let pods = plan.pod_cidrs();
        let outside = |ip: &IpAddr| !own.contains(ip) && !pods.iter().any(|net| net.contains(ip));
        all.retain(|socket, _| outside(&socket.ip()) || granted.contains(&socket.ip()));
        Ok(all)
    }
}

impl Lab {
    /// Destinations of the routes into the tunnel on a node, as `ip` prints them.
    ///
    /// # Errors
    /// When the node is down.
    pub async fn tunnel_routes(&self, node: &str) -> Result<BTreeSet<String>> {
        self.destinations(node, &INTO_TUNNEL).await
    }

    async fn destinations(&self, node: &str, selector: &[&str]) -> Result<BTreeSet<String>> {
        let mut all = BTreeSet::new();
        for family in ["-4", "-6"] {
            let words = [&["ip", family, "-j", "route", "show", "table", TABLE], selector].concat();
            let output = self.node(node).try_exec(words).await?;
            // If the routing table does not exist, `ip` prints nothing or an error.
            let routes: Value = serde_json::from_str(&output.stdout).unwrap_or_default();
            let routes = routes.as_array().into_iter().flatten();
            all.extend(routes.filter_map(|route| route["dst"].as_str().map(str::to_owned)));
        }
        Ok(all)
    }
}

/// Read-only rights for the controller: it sees the sandbox's nodes, but its writes are refused.
const READ_ONLY_RIGHTS: &str = "
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: clustermesh-reader}
rules: [{apiGroups: ['*'], resources: ['*'], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: clustermesh-reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: clustermesh-reader}
subjects: [{kind: ServiceAccount, name: clustermesh-controller, namespace: clustermesh}]
";

/// A sandbox whose administrator is malicious.
#[derive(Debug)]
pub struct Attacker<'a> {
    lab: &'a Lab,
    sandbox: Cluster<'a>,
    node: String,
    /// Names of the Peers that the controller wrote into the sandbox.
    pub peers: Vec<String>,
}

impl<'a> Attacker<'a> {
    /// Revokes the controller's rights in the sandbox. `node` = the only node of the sandbox.
    ///
    /// # Errors
    /// When the sandbox's API server does not answer.
    pub async fn new(lab: &'a Lab, sandbox: &str, node: &str) -> Result<Self> {
        let sandbox = lab.cluster(sandbox);
        let revoke = ["delete", "clusterrolebinding", "clustermesh-member"];
        sandbox.kubectl(revoke).await?;
        let peers = sandbox.kubectl(["get", "peers", "-o", "name"]).await?.stdout;
        let peers = peers.lines().filter_map(|line| line.split_once('/'));
        Ok(Self {
            lab,
            peers: peers.map(|(_, name)| name.to_owned()).collect(),
            sandbox,
            node: node.to_owned(),
        })
    }

    /// Allows the controller to read in the sandbox again, but not to write. Without read access, a
    /// restarted controller does not know the sandbox's nodes, and so cannot write a deleted SandboxAccess again. A running
    /// controller retries its reads within half a minute.
    ///
    /// # Errors
    /// When the sandbox's API server does not answer.
    pub async fn grant_read_access(&self) -> Result<()> {
        self.sandbox.apply(READ_ONLY_RIGHTS).await
    }

    /// The last part of a Peer's name: the Node or gateway that the Peer describes.
    #[must_use]
    pub fn node_or_gateway_of(peer: &str) -> &str {
        peer.rsplit_once("--").map_or(peer, |(_, node)| node)
    }

    /// Sets a Peer's public key.
    ///
    /// # Errors
    /// When there is no such Peer.
    pub async fn set_public_key(&self, peer: &str, key: &str) -> Result<()> {
        self.patch(peer, &json!({"spec": {"publicKey": key}})).await
    }

    /// Gives one Peer `addresses` as allowed IPs, and waits until the node's routing table has a route into the tunnel or a
    /// `throw` route for each. Returns those with a `throw` route, which the node keeps on the underlay, such as its next hop.
    ///
    /// # Errors
    /// When a Peer cannot be changed, or when the routes do not follow a change within 90 s.
    pub async fn route_through(&self, chosen: &str, addresses: &BTreeSet<IpAddr>) -> Result<BTreeSet<IpAddr>> {
        // First remove the allowed IPs of all Peers, so that no old route is mistaken for a new one.
        for name in &self.peers {
            self.set_allowed_ips(name, &BTreeSet::new()).await?;
        }
        let matching = async |selector: &[&str]| {
            let found = self.lab.destinations(&self.node, selector).await;
            let found = found.map_err(|error| error.to_string())?;
            let found = addresses.iter().filter(|ip| found.contains(&ip.to_string()));
            Ok::<BTreeSet<IpAddr>, String>(found.copied().collect())
        };
        let none = async || match matching(&INTO_TUNNEL).await?.len() {
            0 => Ok(()),
            tunneled => Err(format!("{tunneled} addresses")),
        };
        wait_until("none of these addresses to have a route to kilo0", TIMEOUT, none).await?;
        self.set_allowed_ips(chosen, addresses).await?;
        let all = async || {
            let (tunneled, thrown) = (matching(&INTO_TUNNEL).await?, matching(&["type", "throw"]).await?);
            if tunneled.union(&thrown).count() == addresses.len() {
                Ok(thrown)
            } else {
                Err(format!("{} of {} addresses", tunneled.len(), addresses.len()))
            }
        };
        wait_until("every address to have a route to kilo0 or a throw route", TIMEOUT, all).await
    }

    async fn set_allowed_ips(&self, peer: &str, addresses: &BTreeSet<IpAddr>) -> Result<()> {
        let ranges = addresses.iter().map(|ip| IpNet::from(*ip).to_string());
        self.patch(peer, &json!({"spec": {"allowedIPs": ranges.collect::<Vec<_>>()}}))
            .await
    }

    async fn patch(&self, peer: &str, change: &Value) -> Result<()> {
        let words = ["patch", "peer", peer, "--type=merge", "-p", &change.to_string()];
        self.sandbox.kubectl(words).await.map(drop)
    }
}
