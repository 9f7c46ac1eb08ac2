//! One pass over the node: what was seen -> compile -> diff -> apply -> what to publish; and the look at the peers between
//! passes. When to do which is `run`'s business.
//!
//! The order is what keeps packets off the underlay. On a node where nothing of ours stands: the device, the firewall
//! (which drops mesh prefixes that leave by another device), the routes (`unreachable` behind everything), then the peers.
//! Later: the firewall, then the peers, then the routes, so that a new route always has somebody behind it and nobody's
//! session is touched. Without the firewall nothing else is done.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::Path,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use clustermesh_agent_core::{
    compile::{Compiled, compile},
    device::diff,
    health::State,
    mtu,
    numbers::MARK_UNDERLAY,
};
use clustermesh_api::annotations::Agent;
use clustermesh_core::key::PublicKey;
use serde_json::json;
use tokio::sync::watch;

use crate::{
    args::{Config, Mtu},
    device::{Configuration, Device, DeviceError},
    endpoints::Tracks,
    firewall::{Backend, Keeper},
    identity::{
        address::{Claim, Me, choose},
        key::NodeKey,
    },
    metrics::{Metrics, Traffic},
    publish::{
        Wanted,
        identity::{Facts, wanted},
    },
    route::{self, Routing},
    source::{
        client::Server,
        objects::{NodeSeen, revision},
        store::{Store, World},
        underlay::{self, Underlay},
    },
    status::{Dump, Said, Trouble, Troubles},
};

mod inputs;

use inputs::{Gathered, Local, gather};

/// A check-in of kg that is not older than this is one of a kg that lives: it writes every 30 s (KILO.md §2).
const KG_ALIVE_SECONDS: i64 = 60;
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Opens the device.
pub(crate) type Opener = Box<dyn Fn(&Configuration) -> Result<Box<dyn Device>, DeviceError> + Send>;

/// What a reconciler is made of.
pub(crate) struct Parts<R, F> {
    pub(crate) config: Config,
    pub(crate) key: NodeKey,
    pub(crate) server: Server,
    pub(crate) store: Store,
    pub(crate) routing: R,
    pub(crate) firewall: Keeper<F>,
    pub(crate) open: Opener,
    pub(crate) names: watch::Sender<BTreeSet<String>>,
    pub(crate) publish: watch::Sender<Wanted>,
    pub(crate) metrics: Metrics,
    pub(crate) troubles: Troubles,
    pub(crate) dump: Dump,
}

/// Keeps one node as it should be.
pub(crate) struct Reconciler<R, F> {
    parts: Parts<R, F>,
    device: Option<(Box<dyn Device>, u16)>,
    tracks: Tracks,
    current: Option<Current>,
    said: Said,
}

/// What the last pass left in force, for the looks in between.
struct Current {
    compiled: Compiled,
    clusters: BTreeMap<PublicKey, String>,
    node: NodeSeen,
    underlay: Underlay,
    wireguard_ip: IpAddr,
    mtu: u16,
    policy_revision: String,
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    pub(crate) fn new(parts: Parts<R, F>) -> Self {
        Self {
            parts,
            device: None,
            tracks: Tracks::default(),
            current: None,
            said: Said::default(),
        }
    }

    /// Brings the node to what was seen. False = something is left to do; try again soon.
    pub(crate) async fn pass(&mut self) -> bool {
        let mut troubles = Vec::new();
        if let Err(trouble) = self.steps(&mut troubles).await {
            troubles.push(trouble);
        }
        let well = troubles.iter().all(|trouble| trouble.harmless);
        self.parts.dump.set(
            "troubles",
            json!(
                troubles
                    .iter()
                    .map(|t| (t.part, &t.message))
                    .collect::<BTreeMap<_, _>>()
            ),
        );
        self.parts.troubles.set(troubles);
        well
    }

    async fn steps(&mut self, troubles: &mut Vec<Trouble>) -> Result<(), Trouble> {
        let world = self.parts.store.world();
        waiting(&world)?;
        troubles.extend(world.absent().into_iter().map(|kind| {
            let message = format!(
                "the CRD of {kind} is not installed in this cluster, which counts as none; apply the project's crds/, this \
                 agent then carries on by itself"
            );
            Trouble::harmless("source", message)
        }));
        let config = self.parts.config.clone();
        let own = own_node(&world, &config.node_name)?;
        beside_kg(&own, SystemTime::now())?;
        let wireguard_ip = self.address(&world, &own)?;
        let internal = own.internal_ips.iter().copied().collect();
        let underlay = underlay::read(&internal, &config.interface)
            .await
            .map_err(|e| Trouble::new("underlay", e))?;
        let resolvers = underlay::resolvers(Path::new(RESOLV_CONF))
            .map_err(|e| Trouble::new("underlay", format!("cannot read {RESOLV_CONF}: {e}")))?;
        let mtu = match config.mtu {
            Mtu::Auto => mtu::auto(underlay.mtu),
            Mtu::Fixed(mtu) => mtu,
        };
        let first = self.ensure_device(mtu)?;

        let gathered = gather(
            &world,
            &own,
            &Local {
                name: &config.node_name,
                public_key: self.parts.key.public(),
                wireguard_ip,
                device: &config.interface,
                port: config.port,
                mtu,
                underlay: &underlay,
                resolvers: &resolvers,
                bypass: &config.bypass,
                servers: &self.servers(&world),
            },
        );
        self.look_up(&gathered);
        let compiled = compile(&gathered.inputs);
        self.report(&gathered, &compiled);
        let tried = compiled.peers.iter().map(|(key, spec)| {
            let endpoints = compiled.endpoints.get(key).map_or(&[][..], Vec::as_slice);
            (*key, endpoints, spec.keepalive.is_some())
        });
        self.tracks.sync(tried, Instant::now());

        self.parts
            .firewall
            .converge(&compiled.firewall)
            .await
            .map_err(|e| Trouble::new("firewall", e))
            .map(|done| {
                if done.is_some() {
                    self.parts.metrics.applied("firewall", 1);
                    tracing::info!("firewall table written");
                }
            })?;
        troubles.extend(
            route::sysctl::ensure(&compiled.sysctls)
                .await
                .iter()
                .map(|e| Trouble::new("sysctl", e)),
        );
        let routed = if first {
            let routed = self.apply_routes(&compiled).await;
            self.apply_peers(&compiled)?;
            routed
        } else {
            self.apply_peers(&compiled)?;
            self.apply_routes(&compiled).await
        };
        self.current = Some(Current {
            compiled,
            clusters: gathered.clusters,
            node: own,
            underlay,
            wireguard_ip,
            mtu,
            policy_revision: revision(world.policies.known().map(|(_, policy)| policy)),
        });
        troubles.extend(routed?);
        self.look();
        Ok(())
    }

    /// The node's WireGuard address, from its own and the others' claims.
    fn address(&self, world: &World, own: &NodeSeen) -> Result<IpAddr, Trouble> {
        let config = &self.parts.config;
        let claims: Vec<Claim> = world
            .nodes
            .known()
            .filter_map(|(node, seen)| {
                Some(Claim {
                    created: seen.created,
                    node: node.to_owned(),
                    address: seen.wireguard_ip?,
                })
            })
            .collect();
        let me = Me {
            created: own.created,
            node: &config.node_name,
            published: own.wireguard_ip,
        };
        let address = choose(config.range, &me, &claims).map_err(|e| Trouble::new("identity", e))?;
        if self
            .current
            .as_ref()
            .is_none_or(|current| current.wireguard_ip != address)
        {
            tracing::info!(%address, published = ?own.wireguard_ip, "this node's WireGuard address");
        }
        Ok(address)
    }

    /// Opens the device, or changes what differs. True = it was opened just now and holds nobody.
    fn ensure_device(&mut self, mtu: u16) -> Result<bool, Trouble> {
        let trouble = |error: DeviceError| Trouble::new("device", error);
        let configuration = Configuration {
            private_key: self.parts.key.secret().clone(),
            listen_port: self.parts.config.port,
            fwmark: MARK_UNDERLAY,
            mtu,
        };
        match &mut self.device {
            Some((_, at)) if *at == mtu => Ok(false),
            Some((device, at)) => {
                device.configure(&configuration).map_err(trouble)?;
                tracing::info!(mtu, was = *at, "device reconfigured");
                *at = mtu;
                Ok(false)
            }
            None => {
                let device = (self.parts.open)(&configuration).map_err(trouble)?;
                let (backend, why) = (device.backend(), self.parts.config.backend_reason);
                tracing::info!(interface = device.interface(), backend, why, mtu, "device opened");
                self.device = Some((device, mtu));
                self.tracks.restart();
                Ok(true)
            }
        }
    }

    /// Where this process is told to find its API server.
    fn servers(&self, world: &World) -> BTreeSet<SocketAddr> {
        let Server { host, port } = &self.parts.server;
        let configured = match host {
            Ok(ip) => Some(*ip),
            Err(name) => world.addresses.get(name).copied(),
        };
        let service = std::env::var("KUBERNETES_SERVICE_HOST")
            .ok()
            .and_then(|host| host.parse().ok());
        let service_port = std::env::var("KUBERNETES_SERVICE_PORT")
            .ok()
            .and_then(|port| port.parse().ok());
        let at = |ip: IpAddr, port| SocketAddr::new(ip.to_canonical(), port);
        let configured = configured.map(|ip| at(ip, *port));
        configured
            .into_iter()
            .chain(service.map(|ip| at(ip, service_port.unwrap_or(443))))
            .collect()
    }

    fn look_up(&self, gathered: &Gathered) {
        let mut names = gathered.names.clone();
        names.extend(self.parts.server.host.as_ref().err().cloned());
        self.parts.names.send_if_modified(|wanted| {
            let changed = *wanted != names;
            *wanted = names;
            changed
        });
    }

    /// Says what is left out: once in the log, always in the metric.
    fn report(&mut self, gathered: &Gathered, compiled: &Compiled) {
        let mut reasons: BTreeMap<String, i64> = BTreeMap::new();
        let mut lines = BTreeSet::new();
        for (object, problem) in &gathered.unreadable {
            *reasons.entry("Unreadable".to_owned()).or_default() += 1;
            lines.insert(format!("{object}: Unreadable: {problem}"));
        }
        for refused in &compiled.refused {
            *reasons.entry(refused.reason.as_str().to_owned()).or_default() += 1;
            lines.insert(refused.to_string());
        }
        self.parts.metrics.refused(&reasons);
        self.parts.dump.set("refused", json!(lines));
        self.said.set(lines);
    }

    fn apply_peers(&mut self, compiled: &Compiled) -> Result<(), Trouble> {
        let trouble = |error: DeviceError| Trouble::new("device", error);
        let Some((device, _)) = &mut self.device else {
            return Ok(());
        };
        let mut desired = compiled.peers.clone();
        for (key, spec) in &mut desired {
            spec.endpoint = self.tracks.current(key);
        }
        let observed = match device.observe() {
            Ok(observed) => observed,
            Err(error) => {
                // Most likely somebody deleted the interface: the next pass makes it again.
                self.device = None;
                return Err(trouble(error));
            }
        };
        let Some(changes) = diff(&observed.peers, &desired) else {
            return Ok(());
        };
        device.apply(&changes).map_err(trouble)?;
        self.parts.metrics.applied("device", changes.len());
        for change in &changes {
            let name = compiled.names.get(change.key()).map_or("", String::as_str);
            tracing::info!(name, "{change}");
        }
        Ok(())
    }

    /// Returns the changes that could not be made as troubles; the others are made.
    async fn apply_routes(&mut self, compiled: &Compiled) -> Result<Vec<Trouble>, Trouble> {
        let pass = route::converge(&mut self.parts.routing, &compiled.routes)
            .await
            .map_err(|e| Trouble::new("routes", e))?;
        for change in &pass.done {
            tracing::info!("{change}");
        }
        self.parts.metrics.applied("routes", pass.done.len());
        if pass
            .failed
            .iter()
            .any(|error| matches!(error, route::Error::NoDevice(_)))
        {
            // Someone deleted the interface under us: the next pass makes it again.
            self.device = None;
        }
        Ok(pass.failed.iter().map(|error| Trouble::new("routes", error)).collect())
    }

    /// Looks at the peers: tries elsewhere who does not answer, and tells metrics and the Node.
    pub(crate) fn look(&mut self) {
        let now = Instant::now();
        let Some(current) = self.current.take() else { return };
        let observed = match self.device.as_ref().map(|(device, _)| device.observe()) {
            Some(Ok(observed)) => observed,
            Some(Err(error)) => {
                tracing::debug!(%error, "cannot look at the device");
                self.current = Some(current);
                return;
            }
            None => {
                self.current = Some(current);
                return;
            }
        };
        if self.tracks.look(&observed.peers, now)
            && let Err(trouble) = self.apply_peers(&current.compiled)
        {
            tracing::debug!(error = trouble.message, "cannot try another endpoint");
        }
        let cluster = |key: &PublicKey| current.clusters.get(key).cloned().unwrap_or_default();
        let traffic: Vec<Traffic> = observed
            .peers
            .iter()
            .map(|(key, peer)| Traffic {
                key: key.to_string(),
                cluster: cluster(key),
                state: self.tracks.state(key, now),
                rx: peer.stats.rx_bytes,
                tx: peer.stats.tx_bytes,
            })
            .collect();
        self.parts.metrics.traffic(&traffic, &observed.drops);
        let count = |state| u32::try_from(traffic.iter().filter(|t| t.state == state).count()).unwrap_or(u32::MAX);
        let agent = Agent {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            backend: self
                .device
                .as_ref()
                .map(|(device, _)| device.backend())
                .unwrap_or_default()
                .to_owned(),
            mode: "full".to_owned(),
            mtu: current.mtu.into(),
            policy_revision: current.policy_revision.clone(),
            peers_up: count(State::Up),
            peers_down: count(State::Down),
        };
        self.dump(&current, &traffic, &observed.peers, &agent);
        let told = wanted(Facts {
            public_key: self.parts.key.public(),
            wireguard_ip: self.parts.config.range.with_prefix(current.wireguard_ip),
            port: self.parts.config.port,
            node: &current.node,
            underlay: &current.underlay.addresses,
            agent,
        });
        self.parts.publish.send_if_modified(|wanted| {
            let changed = *wanted != told;
            *wanted = told;
            changed
        });
        self.current = Some(current);
    }

    fn dump(
        &self,
        current: &Current,
        traffic: &[Traffic],
        observed: &clustermesh_agent_core::device::ObservedPeers,
        agent: &Agent,
    ) {
        let Current {
            compiled,
            underlay,
            wireguard_ip,
            ..
        } = current;
        let states: BTreeMap<&str, &Traffic> = traffic.iter().map(|t| (t.key.as_str(), t)).collect();
        let peers: BTreeMap<&str, _> = compiled
            .peers
            .iter()
            .map(|(key, spec)| {
                let name = compiled.names.get(key).map_or("", String::as_str);
                let stats = observed.get(key).map(|peer| &peer.stats);
                let text = key.to_string();
                let traffic = states.get(text.as_str());
                let peer = json!({
                    "key": text,
                    "cluster": traffic.map(|t| &t.cluster),
                    "state": traffic.map(|t| t.state.as_str()),
                    "allowedIPs": spec.allowed_ips,
                    "candidates": compiled.endpoints.get(key),
                    "configuredEndpoint": self.tracks.current(key),
                    "liveEndpoint": stats.and_then(|s| s.endpoint),
                    "handshakeAgeSeconds": stats.and_then(|s| s.handshake_age).map(|age| age.as_secs()),
                    "rxBytes": traffic.map(|t| t.rx),
                    "txBytes": traffic.map(|t| t.tx),
                });
                (name, peer)
            })
            .collect();
        let dump = &self.parts.dump;
        dump.set("agent", json!(agent));
        dump.set("node", json!({
            "name": self.parts.config.node_name,
            "publicKey": self.parts.key.public().to_string(),
            "wireguardIP": wireguard_ip,
            "underlay": {"interface": underlay.interface.as_str(), "mtu": underlay.mtu, "addresses": underlay.addresses.keys().collect::<Vec<_>>(), "nextHops": underlay.next_hops},
        }));
        dump.set("peers", json!(peers));
        dump.set(
            "routes",
            json!(
                compiled
                    .routes
                    .routes
                    .iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
            ),
        );
        dump.set(
            "firewall",
            json!(
                clustermesh_agent_core::firewall::render(&compiled.firewall)
                    .lines()
                    .collect::<Vec<_>>()
            ),
        );
    }

    /// Ends our part; what stands in the kernel stays.
    pub(crate) fn into_device(self) -> Option<Box<dyn Device>> {
        self.device.map(|(device, _)| device)
    }
}

/// Nothing is touched before everything was read once.
fn waiting(world: &World) -> Result<(), Trouble> {
    let pending: Vec<String> = world
        .pending()
        .iter()
        .map(|kind| match world.errors.get(kind) {
            Some(error) => format!("{kind} ({error})"),
            None => (*kind).to_owned(),
        })
        .collect();
    if pending.is_empty() {
        Ok(())
    } else {
        Err(Trouble::new(
            "source",
            format!("waiting for the first list of: {}", pending.join(", ")),
        ))
    }
}

fn own_node(world: &World, name: &str) -> Result<NodeSeen, Trouble> {
    world.nodes.known().find(|(node, _)| *node == name).map(|(_, seen)| seen.clone()).ok_or_else(|| {
        Trouble::new(
            "source",
            format!("there is no Node {name} in this cluster: correct --node-name, or wait for the kubelet to register it"),
        )
    })
}

/// Two programs cannot own one node's tunnel. This agent never writes `last-seen`, so a fresh one is kg's.
fn beside_kg(own: &NodeSeen, now: SystemTime) -> Result<(), Trouble> {
    let now = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX));
    match own.own.as_ref().and_then(|own| own.kg_seen) {
        Some(seen) if now.saturating_sub(seen) < KG_ALIVE_SECONDS => Err(Trouble::new(
            "kg",
            format!(
                "kg (Kilo) serves this node: it wrote kilo.squat.ai/last-seen {} s ago. Two programs cannot own kilo0: keep \
                 wg-agent off this node (nodeSelector), or take kg off it; this agent starts by itself a minute later",
                now.saturating_sub(seen)
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
