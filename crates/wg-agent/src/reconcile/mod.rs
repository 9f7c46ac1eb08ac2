//! Runs one reconcile pass over the node: observed objects -> compile -> diff -> apply. `preconditions` decides whether
//! a pass may begin, `poll_peers` polls the peers after and between passes, and `run` decides when to run passes and polls.
//!
//! Firewall and routes keep packets for the mesh from leaving unencrypted: the firewall drops packets to mesh networks if they would
//! leave by another device than the tunnel, and `unreachable` routes, with a higher metric than the tunnel's routes, apply while the
//! tunnel's routes are missing. A pass that opens the device, or tries and fails, applies: device, firewall, routes, peers. Any other
//! pass applies: firewall, peers, routes, so that the peer of a new route always exists. If the firewall cannot be written, the pass
//! ends before routes and peers.

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
use tokio::sync::watch;

use crate::{
    args::Config,
    cache::{CacheContent, SavedObjects, UnixTime},
    conntrack,
    device::{Configuration, DeviceError, Opened},
    firewall::{Backend, FirewallManager},
    identity::{
        address::{Claim, OwnClaim, choose},
        key::NodeKey,
        rotation::{self, Evidence, Rotation},
    },
    kernel_events::Event,
    peer_tracker::PeerTracker,
    publish::{DesiredAnnotations, Turn},
    route::{self, Routing, RoutingEvent},
    source::{
        client::Server,
        datapath::DatapathProblem,
        objects::{ParsedNode, policy_revision},
        store::{ClusterSnapshot, Store},
        underlay::{self, Underlay},
    },
    status::{PassReporter, Trouble},
};

mod apply;
mod device;
mod dump;
mod inputs;
mod mtus;
mod poll_peers;
pub(crate) mod preconditions;
mod repair_counter;
mod underlay_cache;
mod withdraw;

use device::TunnelDevice;
use inputs::{GatheredInputs, LocalFacts, Member, gather_inputs};
use mtus::FirstEndpoints;
use preconditions::{KgWatch, cache_trouble, check_first_lists, find_own_node};
use repair_counter::RepairCounter;
use underlay_cache::UnderlayCache;

/// The file that lists the node's name servers.
pub(crate) const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Opens the device.
pub(crate) type Opener = Box<dyn Fn(&Configuration) -> Result<Opened, DeviceError> + Send>;

/// The dependencies of a [`Reconciler`].
pub(crate) struct Dependencies<R, F> {
    pub(crate) config: Config,
    pub(crate) key: NodeKey,
    pub(crate) cluster: ClusterView,
    pub(crate) kernel: Kernel<R, F>,
    pub(crate) cache: CacheWriter,
    /// The annotations that the Node should have.
    pub(crate) publish: watch::Sender<DesiredAnnotations>,
    pub(crate) report: PassReporter,
}

/// The observed cluster.
pub(crate) struct ClusterView {
    /// Its API server.
    pub(crate) server: Server,
    /// Its objects.
    pub(crate) store: Store,
    /// Host names whose addresses the store should contain.
    pub(crate) host_names: watch::Sender<BTreeSet<String>>,
    /// Why packets may bypass the firewall table; `None` = no reason is known.
    pub(crate) datapath_problem: watch::Receiver<Option<DatapathProblem>>,
}

/// The backends that read and write the node's kernel state.
pub(crate) struct Kernel<R, F> {
    pub(crate) routing: R,
    pub(crate) firewall: FirewallManager<F>,
    pub(crate) open: Opener,
}

/// The input of the task that writes the cache file.
pub(crate) struct CacheWriter {
    /// The content. At the start it contains only the live endpoints that an earlier process saved.
    pub(crate) content: watch::Sender<CacheContent>,
    /// When the API server last confirmed the cache of an earlier process.
    pub(crate) confirmed: UnixTime,
    /// How old the confirmation time in the file may become before the file is written again.
    pub(crate) max_lag: Duration,
}

/// Reconciles the kernel state of one node with the cluster's objects.
pub(crate) struct Reconciler<R, F> {
    deps: Dependencies<R, F>,
    device: TunnelDevice,
    rotation: Option<Rotation>,
    tracker: PeerTracker,
    applied: Option<Arc<AppliedState>>,
    repair_counter: RepairCounter,
    underlay: UnderlayCache,
    kg: KgWatch,
}

/// The state that the last pass applied, or tried to apply: some changes may have failed. Polls use it until the next pass.
struct AppliedState {
    inputs: Inputs,
    compiled: Compiled,
    members: BTreeMap<PublicKey, Member>,
    node: ParsedNode,
    underlay: Underlay,
    wireguard_ip: IpAddr,
    first_endpoints: FirstEndpoints,
    sizes: Sizes,
    policy_revision: String,
    /// This node's Node was listed by the API server, and does not come from the cache.
    is_node_listed: bool,
    /// When this node may write its status.
    turn: Turn,
}

impl<R: Routing, F: Backend> Reconciler<R, F> {
    pub(crate) fn new(deps: Dependencies<R, F>) -> Self {
        let live = deps.cache.content.borrow().live.clone();
        Self {
            deps,
            device: TunnelDevice::default(),
            rotation: None,
            tracker: PeerTracker::new(live),
            applied: None,
            repair_counter: RepairCounter::default(),
            underlay: UnderlayCache::default(),
            kg: KgWatch::default(),
        }
    }

    /// Records an event for the next pass.
    pub(crate) fn record_event(&mut self, event: Event) {
        self.underlay.record_event(event);
        self.device.needs_check |= matches!(event, Event::Routing(RoutingEvent::Ours) | Event::Unknown);
    }

    /// Runs one reconcile pass. Returns `false` after a trouble that is not harmless; the pass should then be repeated soon.
    pub(crate) async fn pass(&mut self) -> bool {
        let mut troubles = Vec::new();
        if let Err(trouble) = self.run_steps(&mut troubles).await {
            troubles.push(trouble);
        }
        self.deps.report.set_troubles(troubles)
    }

    async fn run_steps(&mut self, troubles: &mut Vec<Trouble>) -> Result<(), Trouble> {
        let snapshot = self.deps.cluster.store.snapshot();
        check_first_lists(&snapshot)?;
        troubles.extend(snapshot.missing_crds().into_iter().map(|kind| {
            let message = format!(
                "the CRD of {kind} is not installed in this cluster, so there are no {kind} objects; apply the project's crds/, and \
                 this agent continues by itself"
            );
            Trouble::harmless("source", message)
        }));
        let datapath_problem = self.deps.cluster.datapath_problem.borrow().clone();
        troubles.extend(datapath_problem.map(|message| Trouble::harmless("datapath", message)));
        troubles.extend(conntrack::warning().map(|message| Trouble::harmless("conntrack", message)));
        let cached_kinds = snapshot.cached_kinds();
        self.deps.report.metrics.set_cached_kinds(cached_kinds.len());
        troubles.extend(cache_trouble(
            &snapshot,
            &self.deps.config.cache_file,
            self.deps.cache.confirmed,
        ));
        let config = self.deps.config.clone();
        let own = find_own_node(&snapshot, &config.node_name)?;
        if let Err(kg_runs) = self.kg.check(&own, SystemTime::now()) {
            self.withdraw(&own).await?;
            return Err(kg_runs);
        }
        self.kg.is_withdrawn = false;
        troubles.extend(self.advance_rotation(&own).await);
        let wireguard_ip = self.choose_address(&snapshot, &own)?;
        let internal = own.internal_ips.iter().copied().collect();
        let underlay = self.read_underlay(internal).await?;
        let resolvers = underlay::resolvers(Path::new(RESOLV_CONF))
            .map_err(|e| Trouble::new("underlay", format!("cannot read {RESOLV_CONF}: {e}")))?;
        let mut gathered = gather_inputs(
            &snapshot,
            &own,
            &LocalFacts {
                name: &config.node_name,
                public_key: self.deps.key.public(),
                wireguard_ip,
                device: &config.interface,
                port: config.port,
                underlay: &underlay,
                resolvers: &resolvers,
                bypass: &config.bypass,
                servers: &self.api_server_addresses(&snapshot),
            },
        );
        self.request_lookups(&gathered);
        let first_endpoints = mtus::first_endpoints(&gathered.inputs.peers);
        let sizes =
            mtus::packet_sizes(config.mtu, underlay.mtu, &first_endpoints, &self.tracker).unwrap_or_else(|error| {
                let message =
                    format!("cannot look up the routes to the peers' endpoints: {error}; MTUs stay as they were");
                troubles.push(Trouble::harmless("underlay", message));
                let before = self.applied.as_ref().map(|applied| applied.sizes.clone());
                before.unwrap_or_else(|| mtu::auto(underlay.mtu, &BTreeMap::new()))
            });
        gathered.inputs.node.mtu = sizes.device;
        gathered.inputs.peer_mtus = sizes.peer_mtus.clone();
        // Firewall and routes are applied even if the device cannot be opened: they keep packets for the mesh from
        // leaving unencrypted. Exception: before this process applies them for the first time, another program that occupies
        // the interface or port may still use its tunnel. The firewall and routes would interrupt that tunnel.
        let opened = self.ensure_device(sizes.device);
        if self.device.is_occupied && self.applied.is_none() {
            return opened.map(drop);
        }

        let compiled = compile(&gathered.inputs);
        self.report_left_out(&gathered, &compiled);
        let peers = compiled.peers.iter().map(|(key, spec)| {
            let endpoints = compiled.endpoints.get(key).map_or(&[][..], Vec::as_slice);
            let keepalive = spec
                .keepalive
                .map(|seconds| Duration::from_secs(u64::from(seconds.get())));
            (*key, endpoints, keepalive)
        });
        self.tracker.sync(peers, Instant::now());

        self.apply_firewall(&compiled).await?;
        let settings = route::sysctl::converge(&compiled.sysctls).await;
        let repaired = self.repair_counter.count_setting_repairs(&compiled.sysctls, &settings);
        self.deps.report.metrics.count_repairs("sysctls", repaired);
        for name in &settings.written {
            tracing::info!(%name, "kernel setting written");
        }
        troubles.extend(settings.wrong.iter().map(|e| Trouble::new("sysctl", e)));
        // `Ok(false)` = the device was open before this pass.
        let (peers, routed) = if matches!(opened, Ok(false)) {
            let peers = self.apply_peers(&compiled);
            (peers, self.apply_routes(&compiled).await)
        } else {
            let routed = self.apply_routes(&compiled).await;
            (self.apply_peers(&compiled), routed)
        };
        self.applied = Some(Arc::new(AppliedState {
            inputs: gathered.inputs,
            compiled,
            members: gathered.members,
            node: own,
            underlay,
            wireguard_ip,
            first_endpoints,
            sizes,
            policy_revision: policy_revision(snapshot.policies.objects().map(|(_, policy)| policy)),
            is_node_listed: !cached_kinds.contains(&"Node"),
            turn: Turn::of(&config.node_name, snapshot.nodes.objects().map(|(name, _)| name)),
        }));
        if cached_kinds.is_empty() {
            self.save_to_cache(SavedObjects::of(&snapshot), snapshot.is_confirmed());
        }
        self.poll_peers();
        troubles.extend(opened.err().into_iter().chain(peers.err()));
        troubles.extend(routed?);
        Ok(())
    }

    /// Returns the node's underlay; reads it from the kernel only if it may have changed.
    async fn read_underlay(&mut self, internal: BTreeSet<IpAddr>) -> Result<Underlay, Trouble> {
        let now = Instant::now();
        if let Some(known) = self.underlay.get(&internal, now) {
            return Ok(known.clone());
        }
        let read = underlay::read(&internal, &self.deps.config.interface)
            .await
            .map_err(|e| Trouble::new("underlay", e))?;
        self.underlay.set(internal, read.clone(), now);
        Ok(read)
    }

    /// Chooses the node's WireGuard address from its own claim and the claims of other Nodes.
    fn choose_address(&self, snapshot: &ClusterSnapshot, own: &ParsedNode) -> Result<IpAddr, Trouble> {
        let config = &self.deps.config;
        let claims: Vec<Claim> = snapshot
            .nodes
            .objects()
            .filter_map(|(node, seen)| {
                Some(Claim {
                    created: seen.created,
                    node: node.to_owned(),
                    address: seen.wireguard_ip?,
                })
            })
            .collect();
        let me = OwnClaim {
            created: own.created,
            node: &config.node_name,
            published: own.wireguard_ip,
        };
        let address = choose(config.range, &me, &claims).map_err(|e| Trouble::new("identity", e))?;
        if self
            .applied
            .as_ref()
            .is_none_or(|applied| applied.wireguard_ip != address)
        {
            tracing::info!(%address, published = ?own.wireguard_ip, "this node's WireGuard address");
        }
        Ok(address)
    }

    /// Begins, continues or ends a key rotation.
    async fn advance_rotation(&mut self, own_node: &ParsedNode) -> Option<Trouble> {
        let (tracker, config) = (&self.tracker, self.deps.config.clone());
        let published = own_node
            .own
            .as_ref()
            .and_then(|own| own.published.get(KILO_KEY).cloned().flatten());
        let evidence = |rotation: &Rotation| Evidence {
            initiation_seen: rotation.initiation_seen(),
            is_published: published == Some(rotation.public().to_string()),
            unanswered_for: tracker.unanswered_for(Instant::now()),
        };
        let Dependencies { key, cluster, .. } = &mut self.deps;
        let (file, port) = (&config.key_file, config.port);
        rotation::advance(&mut self.rotation, key, file, port, &cluster.store, evidence).await
    }

    /// The key to publish: the next one during a rotation.
    fn key_to_publish(&self) -> PublicKey {
        let next = self.rotation.as_ref().map(Rotation::public);
        next.unwrap_or_else(|| self.deps.key.public())
    }

    /// Sends the applied objects to the cache. `is_confirmed` = the API server still confirms them.
    fn save_to_cache(&self, saved: SavedObjects, is_confirmed: bool) {
        let max_lag = self.deps.cache.max_lag;
        self.deps.cache.content.send_if_modified(|content| {
            // While the API server confirms nothing, unchanged objects keep their confirmation time, so that the cache expires.
            // Changed objects were just received from the API server.
            let unchanged = content.saved.as_deref() == Some(&saved);
            (is_confirmed || !unchanged) && content.confirm(saved, UnixTime::of(SystemTime::now()), max_lag)
        });
    }

    /// The addresses at which this process may reach its API server: from its configuration and its environment.
    fn api_server_addresses(&self, snapshot: &ClusterSnapshot) -> BTreeSet<SocketAddr> {
        let Server { host, port } = &self.deps.cluster.server;
        let configured = match host {
            Ok(ip) => Some(*ip),
            Err(name) => snapshot.addresses.get(name).copied(),
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

    fn request_lookups(&self, gathered: &GatheredInputs) {
        let mut host_names = gathered.host_names.clone();
        host_names.extend(self.deps.cluster.server.host.as_ref().err().cloned());
        self.deps.cluster.host_names.send_if_modified(|wanted| {
            let changed = *wanted != host_names;
            *wanted = host_names;
            changed
        });
    }

    /// Reports objects that are unreadable or refused.
    fn report_left_out(&mut self, gathered: &GatheredInputs, compiled: &Compiled) {
        let unreadable = gathered
            .unreadable
            .iter()
            .map(|(object, problem)| ("Unreadable".to_owned(), format!("{object}: Unreadable: {problem}")));
        let refused = compiled.refused.iter();
        let refused = refused.map(|refused| (refused.reason.as_str().to_owned(), refused.to_string()));
        self.deps.report.set_left_out(unreadable.chain(refused));
    }
}

#[cfg(test)]
mod tests;
