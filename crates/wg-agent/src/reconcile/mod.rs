//! One pass over the node: what was seen -> compile -> diff -> apply. Whether a pass may begin is in `gate`, the look at the
//! peers between passes and what is told of them in `look`; when to do which is `run`'s business.
//!
//! The order is what keeps packets off the underlay. On a node where nothing of ours stands: the device, the firewall
//! (which drops mesh prefixes that leave by another device), the routes (`unreachable` behind everything), then the peers.
//! Later: the firewall, then the peers, then the routes, so that a new route always has somebody behind it and nobody's
//! session is touched. Without the firewall nothing else is done.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use clustermesh_agent_core::{
    compile::{Compiled, Inputs, compile},
    mtu::{self, Sizes},
};
use clustermesh_api::names::KILO_KEY;
use clustermesh_core::key::PublicKey;
use serde_json::json;
use tokio::sync::watch;

use crate::{
    args::Config,
    cache::{Kept, Live, Saved, Stamp},
    conntrack,
    device::{Configuration, Device, DeviceError, Opened},
    endpoints::Tracks,
    firewall::{Backend, Keeper},
    identity::{
        address::{Claim, Me, choose},
        key::NodeKey,
        rotation::{self, Rotation, Signs},
    },
    metrics::Metrics,
    publish::Wanted,
    route::{self, Routing},
    source::{
        client::Server,
        datapath::Found,
        objects::{NodeSeen, revision},
        store::{Store, World},
        underlay::{self, Underlay},
    },
    status::{Dump, Said, Trouble, Troubles},
};

mod apply;
mod device;
mod drift;
mod dump;
pub(crate) mod gate;
mod inputs;
mod look;
mod sizes;
mod withdraw;

use drift::Drift;
use gate::{KgWatch, from_cache, own_node, waiting};
use inputs::{Gathered, Local, Member, gather};
use sizes::Ends;

/// Names the resolvers.
pub(crate) const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Opens the device.
pub(crate) type Opener = Box<dyn Fn(&Configuration) -> Result<Opened, DeviceError> + Send>;

/// What has to be known of the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cache {
    /// When the API server confirmed what an earlier process kept.
    pub(crate) confirmed: Stamp,
    /// How far the file may lag behind.
    pub(crate) step: Duration,
}

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
    /// What is wrong with a datapath that leads packets past us.
    pub(crate) bypassed: watch::Receiver<Option<Found>>,
    pub(crate) kept: watch::Sender<Kept>,
    pub(crate) cache: Cache,
    /// Where an earlier process heard from its peers.
    pub(crate) live: Live,
    pub(crate) metrics: Metrics,
    pub(crate) troubles: Troubles,
    pub(crate) dump: Dump,
}

/// Keeps one node as it should be.
pub(crate) struct Reconciler<R, F> {
    parts: Parts<R, F>,
    device: Option<(Box<dyn Device>, u16, PublicKey)>,
    /// Why the device is of its backend.
    why: String,
    rotation: Option<Rotation>,
    tracks: Tracks,
    current: Option<Arc<Current>>,
    drift: Drift,
    said: Said,
    kg: KgWatch,
    /// Nothing of this agent's is on the node, which kg serves.
    withdrawn: bool,
    /// Another program has the interface's name, or its port.
    occupied: bool,
}

/// What the last pass left in force, for the looks in between.
struct Current {
    inputs: Inputs,
    compiled: Compiled,
    members: BTreeMap<PublicKey, Member>,
    node: NodeSeen,
    underlay: Underlay,
    wireguard_ip: IpAddr,
    ends: Ends,
    sizes: Sizes,
    policy_revision: String,
    /// This node's object is as it stands in the cluster.
    seen: bool,
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    pub(crate) fn new(mut parts: Parts<R, F>) -> Self {
        let live = std::mem::take(&mut parts.live);
        Self {
            parts,
            device: None,
            why: String::new(),
            rotation: None,
            tracks: Tracks::new(live),
            current: None,
            drift: Drift::default(),
            said: Said::default(),
            kg: KgWatch::default(),
            withdrawn: false,
            occupied: false,
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
            json!(troubles.iter().map(Trouble::view).collect::<Vec<_>>()),
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
        let bypassed = self.parts.bypassed.borrow().clone();
        troubles.extend(bypassed.map(|message| Trouble::harmless("datapath", message)));
        troubles.extend(conntrack::trouble().map(|message| Trouble::harmless("conntrack", message)));
        let remembered = world.remembered();
        self.parts.metrics.remembered(remembered.len());
        troubles.extend(from_cache(
            &world,
            &self.parts.config.cache_file,
            self.parts.cache.confirmed,
        ));
        let config = self.parts.config.clone();
        let own = own_node(&world, &config.node_name)?;
        if let Err(kg) = self.kg.check(&own, SystemTime::now()) {
            self.withdraw(&own).await?;
            return Err(kg);
        }
        self.withdrawn = false;
        troubles.extend(self.rotate(&own).await);
        let wireguard_ip = self.address(&world, &own)?;
        let internal = own.internal_ips.iter().copied().collect();
        let underlay = self.underlay(internal).await?;
        let resolvers = underlay::resolvers(Path::new(RESOLV_CONF))
            .map_err(|e| Trouble::new("underlay", format!("cannot read {RESOLV_CONF}: {e}")))?;
        let mut gathered = gather(
            &world,
            &own,
            &Local {
                name: &config.node_name,
                public_key: self.parts.key.public(),
                wireguard_ip,
                device: &config.interface,
                port: config.port,
                underlay: &underlay,
                resolvers: &resolvers,
                bypass: &config.bypass,
                servers: &self.servers(&world),
            },
        );
        self.look_up(&gathered);
        let ends = sizes::ends(&gathered.inputs.peers);
        let sizes = sizes::sizes(config.mtu, underlay.mtu, &ends, &self.tracks).unwrap_or_else(|error| {
            let message =
                format!("cannot ask for the routes to the peers' endpoints: {error}; sizes stay as they were");
            troubles.push(Trouble::harmless("underlay", message));
            let before = self.current.as_ref().map(|current| current.sizes.clone());
            before.unwrap_or_else(|| mtu::auto(underlay.mtu, &BTreeMap::new()))
        });
        gathered.inputs.node.mtu = sizes.device;
        gathered.inputs.narrow = sizes.narrow.clone();
        // Without a device, firewall and routes keep what is meant for the mesh from leaving in clear all the same. Not where
        // another program's tunnel may be at work: they would cut it off.
        let opened = self.ensure_device(sizes.device);
        if self.occupied && self.current.is_none() {
            return opened.map(drop);
        }

        let compiled = compile(&gathered.inputs);
        self.report(&gathered, &compiled);
        let tried = compiled.peers.iter().map(|(key, spec)| {
            let endpoints = compiled.endpoints.get(key).map_or(&[][..], Vec::as_slice);
            let keepalive = spec
                .keepalive
                .map(|seconds| Duration::from_secs(u64::from(seconds.get())));
            (*key, endpoints, keepalive)
        });
        self.tracks.sync(tried, Instant::now());

        self.enforce(&compiled).await?;
        let settings = route::sysctl::converge(&compiled.sysctls).await;
        let put_back = self.drift.set(&compiled.sysctls, &settings);
        self.parts.metrics.repaired("sysctls", put_back);
        for name in &settings.written {
            tracing::info!(%name, "kernel setting written");
        }
        troubles.extend(settings.missing.iter().map(|e| Trouble::new("sysctl", e)));
        let (peers, routed) = if matches!(opened, Ok(false)) {
            let peers = self.apply_peers(&compiled);
            (peers, self.apply_routes(&compiled).await)
        } else {
            let routed = self.apply_routes(&compiled).await;
            (self.apply_peers(&compiled), routed)
        };
        self.current = Some(Arc::new(Current {
            inputs: gathered.inputs,
            compiled,
            members: gathered.members,
            node: own,
            underlay,
            wireguard_ip,
            ends,
            sizes,
            policy_revision: revision(world.policies.known().map(|(_, policy)| policy)),
            seen: !remembered.contains(&"Node"),
        }));
        if remembered.is_empty() {
            self.keep(Saved::of(&world), world.current());
        }
        self.look();
        troubles.extend(opened.err().into_iter().chain(peers.err()));
        troubles.extend(routed?);
        Ok(())
    }

    /// The node's own network; read only where it may have changed.
    async fn underlay(&mut self, internal: BTreeSet<IpAddr>) -> Result<Underlay, Trouble> {
        let now = Instant::now();
        if let Some(known) = self.drift.underlay(&internal, now) {
            return Ok(known.clone());
        }
        let read = underlay::read(&internal, &self.parts.config.interface)
            .await
            .map_err(|e| Trouble::new("underlay", e))?;
        self.drift.saw(internal, read.clone(), now);
        Ok(read)
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

    /// Goes on with a change of this node's key, if there is one.
    async fn rotate(&mut self, own: &NodeSeen) -> Option<Trouble> {
        let (tracks, config) = (&self.tracks, self.parts.config.clone());
        let published = own
            .own
            .as_ref()
            .and_then(|own| own.published.get(KILO_KEY).cloned().flatten());
        let signs = |rotation: &Rotation| Signs {
            called: rotation.called(),
            published: published == Some(rotation.public().to_string()),
            silent: tracks.silent(Instant::now()),
        };
        let Parts { key, store, .. } = &mut self.parts;
        rotation::step(&mut self.rotation, key, &config.key_file, config.port, store, signs).await
    }

    /// The key to tell the others.
    fn public_key(&self) -> PublicKey {
        let next = self.rotation.as_ref().map(Rotation::public);
        next.unwrap_or_else(|| self.parts.key.public())
    }

    /// What was read whole and applied is what the next start may work from; `current` = the API server still says so.
    fn keep(&self, saved: Saved, current: bool) {
        let step = self.parts.cache.step;
        self.parts.kept.send_if_modified(|kept| {
            // What is only in force, and not confirmed any more, ages.
            let unchanged = kept.saved.as_deref() == Some(&saved);
            (current || !unchanged) && kept.confirm(saved, Stamp::of(SystemTime::now()), step)
        });
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
}

#[cfg(test)]
mod tests;
