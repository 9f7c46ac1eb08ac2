//! Runs one pass of a gateway: applies the objects to firewall table, device, routes and peers, and reports the result in
//! the status of the SandboxGateway.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use clustermesh_agent_core::{
    device::{Peers, diff},
    gateway::{Access, Compiled, Inputs, Settings, compile},
    mtu, prefixes,
    routes::{Plan, desired},
};
use clustermesh_api::sandbox::SandboxGatewayStatus;
use ipnet::IpNet;
use serde_json::json;
use tokio::sync::watch;

use super::{
    RESYNC, RETRY, connections, forwarding,
    objects::ParsedGateway,
    publish::Identity,
    readiness_gate::{self, ReadinessGate},
    saved_endpoints::SavedEndpoints,
    snapshot::GatewaySnapshot,
    table_manager::{Progress, TableManager},
};
use crate::{
    args::GatewayConfig,
    device::{self, Configuration, Device, Opened, userspace::Options},
    identity::key::NodeKey,
    route::{self, Netlink},
    source::underlay,
    status::{PassReporter, Trouble},
};

/// Configures the network namespace of one gateway pod.
pub(super) struct Gateway {
    pub(super) config: GatewayConfig,
    pub(super) key: NodeKey,
    /// The API server's address in this process's configuration; `None` = configured by name.
    pub(super) api_server: Option<IpAddr>,
    pub(super) table_manager: TableManager,
    pub(super) tunnel: Tunnel,
    pub(super) gate: ReadinessGate,
    pub(super) publish: watch::Sender<SandboxGatewayStatus>,
    pub(super) report: PassReporter,
}

/// The WireGuard device with its routes and peers.
pub(super) struct Tunnel {
    pub(super) routing: Netlink,
    pub(super) device: Option<Box<dyn Device>>,
    /// Whether the device has the desired peers: false after the device was opened, and after the table could not be
    /// written (then all peers are removed), until a pass applies them.
    pub(super) has_desired_peers: bool,
    pub(super) saved_endpoints: SavedEndpoints,
}

/// The result of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PassResult {
    /// Everything is applied.
    Done,
    /// A large table is written in several steps, and the next step is due. It uses the latest snapshot.
    Unfinished,
    /// Something failed.
    Failed,
}

impl PassResult {
    pub(super) const fn pause(self) -> Duration {
        match self {
            Self::Done => RESYNC,
            Self::Unfinished => Duration::ZERO,
            Self::Failed => RETRY,
        }
    }
}

/// The pod's own network.
struct PodNetwork {
    /// MTU of the WireGuard device over this network.
    tunnel_mtu: u16,
    addresses: BTreeSet<IpAddr>,
}

impl Gateway {
    /// If the pod has no table, writes one without grants before this process opens its first connection. The table enables
    /// conntrack, which does not track connections that were opened before. Their replies would look like new requests,
    /// and the table would drop them.
    pub(super) async fn write_closed_table(&mut self) -> Result<(), Trouble> {
        if self.table_manager.table_exists() {
            return Ok(());
        }
        let pod_network = self.pod_network().await?;
        let inputs = self.inputs(&GatewaySnapshot::default(), &pod_network);
        self.write_table(&compile(&inputs)).await.map(drop)
    }

    /// Runs one reconcile pass.
    pub(super) async fn pass(&mut self, snapshot: &GatewaySnapshot) -> PassResult {
        let mut troubles = Vec::new();
        match self.apply(snapshot, &mut troubles).await {
            Ok(true) => {}
            Ok(false) => return PassResult::Unfinished,
            Err(trouble) => troubles.push(trouble),
        }
        let are_all_harmless = self.report.set_troubles(troubles);
        if are_all_harmless {
            PassResult::Done
        } else {
            PassResult::Failed
        }
    }

    /// Applies table, device, routes and peers, and reports them. False = the table needs another step; until the last
    /// step the status is not published.
    async fn apply(&mut self, snapshot: &GatewaySnapshot, troubles: &mut Vec<Trouble>) -> Result<bool, Trouble> {
        let pod_network = self.pod_network().await?;
        let inputs = self.inputs(snapshot, &pod_network);
        let compiled = compile(&inputs);
        // Objects are not applied while the SandboxAccesses are not listed. A new pod gets a closed table before it has a device.
        // In a restarted container the table and peers of the previous container exist. They stay until two conditions hold:
        // - The snapshot is complete: each namespace with a granted Service is listed or its list failed. Otherwise the new table
        //   would lack the endpoints of a namespace that is not listed yet, and interrupt their connections.
        // - The API server has answered. Before its first answer a new table is closed (`TableManager::open_until`), and would
        //   interrupt all connections.
        let may_apply = snapshot.are_accesses_listed()
            && (self.table_manager.has_written() || snapshot.is_complete() && self.table_manager.api_has_answered());
        if (may_apply || !self.table_manager.table_exists()) && !self.write_table(&compiled).await? {
            return Ok(false);
        }
        self.ensure_device(self.config.mtu.unwrap_or(pod_network.tunnel_mtu))?;
        troubles.extend(forwarding::ensure(&self.config.interface, &compiled.routes).await);
        if may_apply {
            self.ensure_routes(&compiled).await?;
            self.ensure_peers(&compiled.peers)?;
            self.gate.begin(node_keys(&inputs, &compiled), Instant::now());
        } else {
            troubles.push(Trouble::new("objects", snapshot.pending_message()));
        }
        troubles.extend(snapshot.errors().map(|error| Trouble::harmless("objects", error)));
        troubles.extend(self.gate.warning());
        troubles.extend(self.conntrack_warning(compiled.served.len()));
        self.export_state(&compiled);
        // Before the objects are applied, the status that the previous container published is still correct.
        if may_apply {
            self.publish(snapshot, &compiled, &pod_network, troubles);
        }
        Ok(true)
    }

    /// A warning if all sandboxes together can fill the conntrack table, although each stays within its limit.
    fn conntrack_warning(&self, sandboxes: usize) -> Option<Trouble> {
        let (limit, capacity) = (self.config.sandbox_connections, connections::capacity()?);
        let all = u64::from(limit).saturating_mul(sandboxes as u64);
        (all > capacity).then(|| {
            Trouble::harmless(
                "connections",
                format!(
                    "{sandboxes} sandboxes may have {limit} connections each, and the conntrack table of this pod has {capacity} entries \
                     (net.netfilter.nf_conntrack_max): lower --sandbox-connections, or let another set of gateways serve some of them \
                     (--serves)"
                ),
            )
        })
    }

    /// Keeps the table open until `--grant-timeout` after the API server's last answer. False = the renewal could not be
    /// written.
    pub(super) async fn renew(&mut self, answered: Instant) -> bool {
        match self.table_manager.renew(answered + self.config.grant_timeout).await {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "the timeout of the firewall table could not be renewed; the table is written again");
                self.report.metrics.count_error("firewall");
                false
            }
        }
    }

    async fn pod_network(&self) -> Result<PodNetwork, Trouble> {
        let pod_ips: BTreeSet<IpAddr> = self.config.pod_ips.iter().copied().collect();
        let underlay = underlay::read(&pod_ips, &self.config.interface).await;
        let underlay = underlay.map_err(|error| Trouble::new("network", error))?;
        Ok(PodNetwork {
            // Leaves room for the outer headers over IPv6, which are the larger ones.
            tunnel_mtu: (underlay.mtu - mtu::overhead(prefixes::Family::V6)).max(mtu::MINIMUM),
            addresses: underlay.addresses.into_keys().chain(pod_ips).collect(),
        })
    }

    fn inputs(&self, snapshot: &GatewaySnapshot, pod_network: &PodNetwork) -> Inputs {
        let config = &self.config;
        let pod_addresses = pod_network.addresses.iter().copied().map(IpNet::from);
        let server = self.api_server.map(IpNet::from);
        Inputs {
            settings: Settings {
                interface: config.interface.clone(),
                listen_port: config.port,
                admin_port: config.listen.port(),
                addresses: config.addresses.clone(),
                endpoint_networks: config.endpoint_networks.clone(),
                reserved: pod_addresses
                    .chain(server)
                    .chain(config.gateway_cidrs.iter().copied())
                    .collect(),
                serves: config.serves.clone(),
                new_connections: config.sandbox_new_flows,
                sandbox_connections: config.sandbox_connections,
                endpoint_connections: config.endpoint_connections,
            },
            accesses: snapshot.accesses(),
            services: snapshot.services(&config.gateway.namespace),
        }
    }

    /// Writes one step of the table; true = it was the last step. If it cannot be written, all peers are removed, because
    /// the old table may contain revoked grants.
    async fn write_table(&mut self, compiled: &Compiled) -> Result<bool, Trouble> {
        match self.table_manager.converge(&compiled.table).await {
            Ok(Progress { changes, finished }) => {
                if changes > 0 {
                    self.report.metrics.count_changes("firewall", changes);
                    tracing::info!(
                        sandboxes = compiled.served.len(),
                        grants = compiled.table.count_open_grants(),
                        finished,
                        "firewall table written"
                    );
                }
                if finished || self.table_manager.is_current() {
                    return Ok(finished);
                }
                let message = "the table is written in several steps, and another program may have changed nftables of this pod between \
                               two steps; the whole table is written again";
                Err(Trouble::new("firewall", message))
            }
            Err(error) => {
                if let Err(trouble) = self.ensure_peers(&Peers::new()) {
                    tracing::error!(
                        error = trouble.message,
                        "the peers could not be removed from the device"
                    );
                }
                // Until the desired peers are on the device again, `poll_peers` must not save endpoints: it would overwrite those
                // of the removed peers.
                self.tunnel.has_desired_peers = false;
                Err(Trouble::new(
                    "firewall",
                    format!("{error}; until the table is written, no sandbox has a peer here"),
                ))
            }
        }
    }

    fn ensure_device(&mut self, mtu: u16) -> Result<(), Trouble> {
        let trouble = |error: device::DeviceError| Trouble::new("device", error);
        let configuration = Configuration {
            private_key: self.key.secret().clone(),
            listen_port: self.config.port,
            fwmark: 0,
            mtu,
        };
        if let Some(device) = &mut self.tunnel.device {
            match device.observe() {
                Ok(observed) => {
                    device.repair(&observed.altered).map_err(trouble)?;
                    return device.configure(&configuration).map_err(trouble);
                }
                Err(error) => {
                    tracing::warn!(%error, "the device failed and is opened again");
                    self.report.metrics.count_repairs("device", 1);
                    self.tunnel.device = None;
                    self.tunnel.has_desired_peers = false;
                }
            }
        }
        let name = self.config.interface.as_str();
        let opened = device::open(self.config.backend, name, &configuration, Options::default());
        let Opened { device, reason } = opened.map_err(trouble)?;
        tracing::info!(
            interface = name,
            backend = device.backend(),
            why = reason,
            mtu,
            "device opened"
        );
        self.tunnel.device = Some(device);
        Ok(())
    }

    async fn ensure_routes(&mut self, compiled: &Compiled) -> Result<(), Trouble> {
        let routes = desired(&Plan {
            addresses: self.config.addresses.clone(),
            peers: compiled.routes.clone(),
            mesh: compiled.routes.clone(),
            ..Plan::default()
        });
        let outcome = route::converge(&mut self.tunnel.routing, &routes).await;
        let outcome = outcome.map_err(|error| Trouble::new("routes", error))?;
        self.report.metrics.count_changes("routes", outcome.done.len());
        match outcome.failed.first() {
            Some(error) => Err(Trouble::new("routes", error)),
            None => Ok(()),
        }
    }

    fn ensure_peers(&mut self, peers: &Peers) -> Result<(), Trouble> {
        let trouble = |error: device::DeviceError| Trouble::new("device", error);
        let Some(device) = &mut self.tunnel.device else {
            return Ok(());
        };
        let observed = device.observe().map_err(trouble)?;
        if let Some(mut changes) = diff(&observed.peers, peers) {
            self.tunnel.saved_endpoints.set_endpoints(&mut changes);
            device.apply(&changes).map_err(trouble)?;
            self.report.metrics.count_changes("device", changes.len());
            for change in &changes {
                tracing::info!("{change}");
            }
        }
        self.tunnel.has_desired_peers = true;
        Ok(())
    }

    /// Polls the peers: records which peers have connected, and saves their endpoints for the next start.
    pub(super) fn poll_peers(&mut self) {
        let Some(device) = self.tunnel.device.as_mut().filter(|_| self.tunnel.has_desired_peers) else {
            return;
        };
        // If this fails, the next pass reports the error.
        if let Ok(observed) = device.observe() {
            self.tunnel.saved_endpoints.save(&observed.peers);
            self.gate.observe(&observed.peers, Instant::now());
        }
    }

    /// Updates metrics and `/debug/state`.
    fn export_state(&mut self, compiled: &Compiled) {
        let refused = compiled.refused.iter();
        let refused = refused.map(|refused| (refused.reason.as_str().to_owned(), refused.to_string()));
        self.report.set_left_out(refused);
        self.report.dump.set("firewall", json!(self.table_manager.text()));
    }

    /// Publishes the applied objects in the status of the SandboxGateway.
    fn publish(
        &self,
        snapshot: &GatewaySnapshot,
        compiled: &Compiled,
        pod_network: &PodNetwork,
        troubles: &mut Vec<Trouble>,
    ) {
        let endpoints = match snapshot.own() {
            Ok(own) => self.endpoints(&own, pod_network),
            Err(why) => {
                // Without the object there is no status to write.
                troubles.push(Trouble::new("object", why));
                return;
            }
        };
        let identity = Identity {
            config: &self.config,
            public_key: self.key.public(),
            backend: self.tunnel.device.as_ref().map_or("", |device| device.backend()),
        };
        let status = identity.status(snapshot.applied_accesses(), compiled, &endpoints, troubles);
        self.report.dump.set("gateway", json!(status));
        self.publish.send_if_modified(|published| {
            let changed = *published != status;
            *published = status;
            changed
        });
    }

    /// The endpoints at which sandboxes reach this pod, in order of preference: the pod's addresses, the endpoints in its
    /// SandboxGateway, the addresses of its node with `spec.nodePort`.
    fn endpoints(&self, own: &ParsedGateway, pod_network: &PodNetwork) -> Vec<SocketAddr> {
        let pod = pod_network
            .addresses
            .iter()
            .filter(|ip| self.config.pod_ips.contains(ip));
        let pod = pod.map(|ip| SocketAddr::new(*ip, self.config.port));
        let node = own.node_port.into_iter().flat_map(|port| {
            let nodes = self.config.node_ips.iter();
            nodes.map(move |ip| SocketAddr::new(*ip, port))
        });
        pod.chain(own.endpoints.iter().copied()).chain(node).collect()
    }
}

/// For each served SandboxAccess, the public keys of those of its nodes that are desired peers.
fn node_keys(inputs: &Inputs, compiled: &Compiled) -> readiness_gate::NodeKeys {
    let served = inputs
        .accesses
        .iter()
        .filter(|access| compiled.served.contains(&access.name));
    let keys = |access: &Access| {
        let keys = access.nodes.iter().filter_map(|node| node.public_key.as_ref().ok());
        keys.filter(|key| compiled.peers.contains_key(key)).copied().collect()
    };
    served.map(|access| (access.name.clone(), keys(access))).collect()
}
