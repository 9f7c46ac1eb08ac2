//! Applies the shipped NetworkPolicy for a sandbox whose nodes are pods of the hub, with the lab's values, and
//! lists the TCP sockets of the lab that it admits. The rule for WireGuard to the gateways needs no value of the lab, because it
//! selects the gateways by their labels.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use crate::lab::worker_namespace;
use crate::product::{Granted, repository_file};
use crate::{Cluster, Error, Lab, NodeNetwork, Result, TrafficClient};

const SHIPPED: &str = "deploy/cozystack/sandbox-networkpolicy.yaml";

/// A sandbox, its hub, and the NetworkPolicy between them.
#[derive(Debug)]
pub struct Boundary<'a> {
    lab: &'a Lab,
    sandbox: Cluster<'a>,
    hub: Cluster<'a>,
}

impl Lab {
    /// The boundary of a cluster whose nodes are pods of another cluster.
    ///
    /// # Errors
    /// When its nodes are not pods.
    pub fn boundary(&self, sandbox: &str) -> Result<Boundary<'_>> {
        let sandbox = self.cluster(sandbox);
        match &sandbox.plan().node_network {
            NodeNetwork::Pods { of, .. } => Ok(Boundary {
                lab: self,
                hub: self.cluster(of),
                sandbox,
            }),
            NodeNetwork::Underlay | NodeNetwork::Nat { .. } => Err(Error::Other(format!(
                "the nodes of {} are not pods: no NetworkPolicy selects them",
                sandbox.plan().name
            ))),
        }
    }
}

impl Boundary<'_> {
    /// The shipped file with values of the lab. Of the values that the file marks `SET`, this replaces the namespace, the
    /// sandbox's name and the address of its API server. The address of the registry stays, because the lab has no registry.
    ///
    /// # Errors
    /// When the file does not exist, or does not contain such a value.
    pub fn policy(&self) -> Result<String> {
        let shipped = repository_file(SHIPPED)?;
        let plan = self.sandbox.plan();
        let values = [
            (
                "namespace: tenant-notebooks",
                format!("namespace: {}", worker_namespace(plan)),
            ),
            ("kubernetes-notebooks", format!("kubernetes-{}", plan.name)),
            ("198.51.100.1/32", format!("{}/32", plan.api_address())),
        ];
        values.into_iter().try_fold(shipped, |text, (marked, value)| {
            if text.contains(marked) {
                Ok(text.replace(marked, &value))
            } else {
                Err(Error::Other(format!("{SHIPPED} has no {marked:?} to replace")))
            }
        })
    }

    /// The TCP sockets of the lab that the policy admits for the sandbox's nodes: their API server, at its ClusterIP in the hub and at
    /// its own address, and the hub's DNS.
    ///
    /// # Errors
    /// When the hub's API server does not answer.
    pub async fn admitted(&self) -> Result<BTreeSet<SocketAddr>> {
        let plan = self.sandbox.plan();
        let mut out: BTreeSet<SocketAddr> = [plan.advertised_api(), plan.api_address()]
            .map(|address| SocketAddr::new(address, 6443))
            .into();
        let words = [
            "-n",
            "kube-system",
            "get",
            "pods",
            "-l",
            "k8s-app=kube-dns",
            "-o",
            "json",
        ];
        let pods = self.hub.kubectl(words).await?.stdout;
        let pods: Value = serde_json::from_str(&pods).map_err(|error| Error::Other(format!("{error}: {pods}")))?;
        let pods = pods["items"].as_array().into_iter().flatten();
        let pods = pods.filter_map(|pod| pod["status"]["podIP"].as_str()?.parse::<IpAddr>().ok());
        out.extend(pods.chain([self.hub.plan().dns_ip()]).map(|ip| SocketAddr::new(ip, 53)));
        Ok(out)
    }

    /// The sockets to scan: those of the hub and of the other clusters, except at the sandbox's own addresses; those at
    /// the gateways' WireGuard addresses; and the admitted ones.
    ///
    /// # Errors
    /// When an API server does not answer.
    pub async fn sockets(&self, others: &[&Cluster<'_>], granted: &Granted) -> Result<BTreeMap<SocketAddr, String>> {
        let own: BTreeSet<IpAddr> = self.sandbox.sockets().await?.into_keys().map(|one| one.ip()).collect();
        let mut all = self.hub.sockets().await?;
        for other in others {
            all.extend(other.sockets().await?);
        }
        all.retain(|socket, _| !own.contains(&socket.ip()));
        granted.add_gateway_sockets(&mut all);
        for socket in self.admitted().await? {
            // `all` contains the hub's DNS already, but not the sandbox's API server: the sandbox's own addresses were removed.
            all.entry(socket)
                .or_insert_with(|| "the sandbox's API server".to_owned());
        }
        Ok(all)
    }

    /// Applies the policy and waits until it is in force for `from`: every socket of `open` that is neither
    /// admitted nor granted is closed. `open` = the sockets that were open without the policy.
    ///
    /// # Errors
    /// When such a socket is still open after 90 s.
    pub async fn enforce(
        &self,
        from: &TrafficClient,
        open: &BTreeSet<SocketAddr>,
        granted: &BTreeSet<SocketAddr>,
    ) -> Result<()> {
        self.hub.apply(&self.policy()?).await?;
        let admitted = self.admitted().await?;
        let extra = open
            .iter()
            .filter(|socket| !admitted.contains(socket) && !granted.contains(socket));
        self.lab.wait_for_closed_sockets(from, &extra.copied().collect()).await
    }

    /// Scans all sockets and returns the open ones. Wanted sockets are scanned until they are open, because on a loaded
    /// machine one attempt may time out. The others are scanned once.
    ///
    /// # Errors
    /// When a wanted socket is not open within 90 s.
    pub async fn open_sockets(
        &self,
        from: &TrafficClient,
        all: &BTreeMap<SocketAddr, String>,
        wanted: &BTreeSet<SocketAddr>,
    ) -> Result<BTreeSet<SocketAddr>> {
        self.lab.wait_for_open_sockets(from, wanted).await?;
        let rest = all.keys().filter(|socket| !wanted.contains(socket));
        let mut found = self.lab.scan(from, rest.copied()).await?;
        found.extend(wanted);
        Ok(found)
    }
}
