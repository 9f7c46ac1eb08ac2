//! Runs `--mode=policy`, where kg owns the tunnel: turns PeerPolicies into the firewall table and publishes one
//! annotation.
//!
//! This mode changes no device, key, route, policy routing rule or kernel setting, and nothing that kg writes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant, SystemTime},
};

use clustermesh_agent_core::{
    compile::{Inputs, Node, Peer, compile_policy_mode},
    prefixes::overlap,
};
use clustermesh_api::{annotations::AgentStatus, names::NODE_AGENT};
use clustermesh_core::{key::PublicKey, observe::PeerRole};
use clustermesh_daemon::{Admin, CancellationToken, Heartbeat};
use ipnet::IpNet;
use serde_json::json;
use tokio::sync::watch;

use crate::{
    args::PolicyConfig,
    device,
    firewall::{self, Backend, FirewallManager},
    lock, preflight,
    publish::{DesiredAnnotations, Turn},
    reconcile::preconditions::{check_first_lists, find_own_node, kg_age_if_alive},
    run::bullet_list,
    runtime::{NodeChannels, RuntimeBuilder},
    source::{
        datapath::DatapathProblem,
        objects::{OwnNode, ParsedNode, ParsedPeer, policy_revision},
        store::{ClusterSnapshot, Store},
    },
    status::{PassReporter, Trouble, view::NodeView},
};

/// Time between two passes without any event; a safety net for lost events.
const RESYNC: Duration = Duration::from_secs(30);
/// Object changes within this time are handled in one pass.
const SETTLE: Duration = Duration::from_millis(30);
/// Notifications of nftables within this time are handled in one pass. kube-proxy and kg write often, and the agent's
/// own writes cause notifications, too.
const SETTLE_KERNEL: Duration = Duration::from_millis(300);
/// Pause after a failed pass.
const RETRY: Duration = Duration::from_secs(2);
/// A loop that has sent no heartbeat for this time counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(120);

/// Runs until a signal arrives. The firewall table stays, so policies are enforced while no agent runs.
pub(crate) async fn run(config: PolicyConfig) -> anyhow::Result<()> {
    let lock = lock::take()?;
    // With this backend the check does not require a TUN device, which policy mode does not need.
    let missing = preflight::check(device::Backend::Kernel);
    anyhow::ensure!(
        missing.is_empty(),
        "this node is not ready for wg-agent:\n{}",
        bullet_list(&missing)
    );
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        node = config.node_name,
        interface = %config.interface,
        listen = %config.listen,
        "wg-agent starts in policy mode: kg owns the tunnel, this agent the firewall table"
    );
    let admin = Admin::bind(config.listen)?;
    // Without per-peer metrics and drain time.
    let builder = RuntimeBuilder::open(config.kubeconfig.as_deref(), admin, false, Duration::ZERO).await?;
    let metrics = builder.runtime.metrics.clone();
    let store = Store::new(metrics, None);
    let (
        mut runtime,
        NodeChannels {
            publish,
            datapath_problem,
        },
    ) = builder.start(&lock, &config.node_name, &[NODE_AGENT], &store)?;
    let mode = PolicyMode {
        server: runtime.connection.server.address(),
        firewall: FirewallManager::new(firewall::Nft::default()),
        report: runtime.pass_reporter(),
        known_mesh_networks: BTreeSet::new(),
        config,
        publish,
        datapath_problem,
    };
    run_loop(
        mode,
        &store,
        &runtime.liveness.watch("node", STUCK_AFTER),
        &runtime.stop,
    )
    .await;
    runtime.shut_down().await;
    tracing::info!("wg-agent ends; its firewall table stays, `wg-agent cleanup --mode=policy` removes it");
    Ok(())
}

async fn run_loop<F: Backend>(mut mode: PolicyMode<F>, store: &Store, heartbeat: &Heartbeat, stop: &CancellationToken) {
    let mut nftables = firewall::Watch::open()
        .inspect_err(
            |error| tracing::warn!(%error, "cannot subscribe to changes of nftables; polling every {} s", RESYNC.as_secs()),
        )
        .ok();
    while !stop.is_cancelled() {
        let are_troubles_harmless = mode.pass(&store.snapshot()).await;
        let next_pass = Instant::now() + if are_troubles_harmless { RESYNC } else { RETRY };
        heartbeat.beat();
        let nftables_event = async {
            match &mut nftables {
                Some(watch) => watch.changed().await.is_ok(),
                None => std::future::pending().await,
            }
        };
        let settle = tokio::select! {
            () = stop.cancelled() => Duration::ZERO,
            () = store.changed() => SETTLE,
            () = tokio::time::sleep_until(next_pass.into()) => Duration::ZERO,
            is_open = nftables_event => {
                if !is_open {
                    nftables = firewall::Watch::open().ok();
                }
                SETTLE_KERNEL
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(settle) => {}
        }
    }
}

/// Reconciles the firewall table of one node with the PeerPolicies.
struct PolicyMode<F> {
    config: PolicyConfig,
    /// The API server's address in this process's configuration; `None` = the configuration has a host name.
    server: Option<SocketAddr>,
    firewall: FirewallManager<F>,
    publish: watch::Sender<DesiredAnnotations>,
    /// Why packets may bypass the firewall table; `None` = no reason is known.
    datapath_problem: watch::Receiver<Option<DatapathProblem>>,
    report: PassReporter,
    /// Networks that belonged to a mesh at any time since this process started, without those that overlap an allowed IP of a
    /// Peer that no controller wrote.
    known_mesh_networks: BTreeSet<IpNet>,
}

impl<F: Backend> PolicyMode<F> {
    /// Runs one reconcile pass. Returns whether all troubles are harmless; otherwise the pass should be repeated soon.
    async fn pass(&mut self, snapshot: &ClusterSnapshot) -> bool {
        let mut troubles = Vec::new();
        if let Err(trouble) = self.run_steps(snapshot, &mut troubles).await {
            troubles.push(trouble);
        }
        self.report.set_troubles(troubles)
    }

    async fn run_steps(&mut self, snapshot: &ClusterSnapshot, troubles: &mut Vec<Trouble>) -> Result<(), Trouble> {
        check_first_lists(snapshot)?;
        let datapath_problem = self.datapath_problem.borrow().clone();
        troubles.extend(datapath_problem.map(|message| Trouble::harmless("datapath", message)));
        troubles.extend(crate::conntrack::warning().map(|message| Trouble::harmless("conntrack", message)));
        let own = find_own_node(snapshot, &self.config.node_name)?;
        let inputs = inputs(snapshot, &own, &self.config, self.server);
        let non_mesh_allowed_ips = non_mesh_allowed_ips(snapshot);
        self.known_mesh_networks
            .retain(|net| !non_mesh_allowed_ips.iter().any(|other| overlap(net, other)));
        let compiled = compile_policy_mode(&inputs, &self.known_mesh_networks);
        self.known_mesh_networks.extend(&compiled.mesh_networks);

        let unreadable = snapshot.policies.objects().filter_map(|(name, seen)| {
            let problem = seen.problem.as_ref()?;
            Some((
                "Unreadable".to_owned(),
                format!("PeerPolicy {name}: Unreadable: {problem}"),
            ))
        });
        let refused = compiled.refused.iter();
        let refused = refused.map(|refused| (refused.reason.as_str().to_owned(), refused.to_string()));
        self.report.set_left_out(unreadable.chain(refused));

        let done = self.firewall.converge(&compiled.firewall).await;
        if done.map_err(|error| Trouble::new("firewall", error))?.is_some() {
            self.report.metrics.count_changes("firewall", 1);
            tracing::info!("firewall table written");
        }
        let text = clustermesh_agent_core::firewall::render(&compiled.firewall);
        self.report
            .dump
            .set("firewall", json!(text.lines().collect::<Vec<_>>()));
        troubles.extend(self.missing_tunnel(&own));
        self.publish(snapshot, &own);
        Ok(())
    }

    /// Returns a trouble if the tunnel's interface does not exist. The rules match the interface by name, so they take
    /// effect as soon as it exists.
    fn missing_tunnel(&self, own: &ParsedNode) -> Option<Trouble> {
        let interface = &self.config.interface;
        let exists = nix::net::if_::if_nametoindex(interface.as_str()).is_ok();
        if exists {
            return None;
        }
        let kg = match kg_age_if_alive(own, SystemTime::now()) {
            Some(ago) => format!("kg checked in {ago} s ago, so its tunnel has another name"),
            None => "and no kg has checked in for this node".to_owned(),
        };
        let message = format!(
            "there is no interface {interface}, {kg}: no policy is enforced, since every rule matches that name. Set \
             --interface to kg's interface, start kg, or run wg-agent with --mode=full"
        );
        Some(Trouble::new("kg", message))
    }

    fn publish(&self, snapshot: &ClusterSnapshot, own_node: &ParsedNode) {
        let agent = AgentStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            mode: "policy".to_owned(),
            datapath_bypassed: DatapathProblem::annotation(self.datapath_problem.borrow().as_ref()),
            policy_revision: policy_revision(snapshot.policies.objects().map(|(_, policy)| policy)),
            ..AgentStatus::default()
        };
        self.report.dump.set("agent", json!(agent));
        let node = NodeView {
            name: self.config.node_name.clone(),
            ..NodeView::default()
        };
        self.report.dump.set("node", json!(node));
        let OwnNode { published, .. } = own_node.own.clone().unwrap_or_default();
        let desired = DesiredAnnotations {
            identity: BTreeMap::new(),
            status: [(NODE_AGENT, Some(agent.to_string()))].into(),
            seen: published,
            turn: Turn::of(&self.config.node_name, snapshot.nodes.objects().map(|(name, _)| name)),
        };
        self.publish.send_if_modified(|wanted| {
            let changed = *wanted != desired;
            *wanted = desired;
            changed
        });
    }
}

/// Allowed IPs of Peers that no controller wrote. The mesh networks of earlier passes that overlap them
/// are forgotten, so packets of these Peers are not filtered.
fn non_mesh_allowed_ips(snapshot: &ClusterSnapshot) -> BTreeSet<IpNet> {
    let others = snapshot.peers.objects().filter(|(_, seen)| !is_mesh_peer(seen));
    others
        .filter_map(|(_, seen)| seen.spec.as_ref().ok())
        .flat_map(|spec| &spec.allowed_ips)
        .copied()
        .collect()
}

/// Whether a controller wrote the Peer. Other Peers, such as a laptop's Peer from kgctl, are left to kg.
fn is_mesh_peer(seen: &ParsedPeer) -> bool {
    !seen.cluster.is_empty()
}

/// Builds the compiler's inputs. Fields that only matter to the owner of the tunnel are empty or have a placeholder.
fn inputs(snapshot: &ClusterSnapshot, own: &ParsedNode, config: &PolicyConfig, server: Option<SocketAddr>) -> Inputs {
    let others = || snapshot.nodes.objects().filter(|(name, _)| *name != config.node_name);
    let node_addresses = snapshot
        .nodes
        .objects()
        .flat_map(|(_, node)| node.internal_ips.iter().chain(&node.wireguard_ip));
    let is_of_this_cluster =
        |seen: &ParsedPeer| matches!(&seen.spec, Ok(spec) if matches!(spec.role, PeerRole::OwnNode(_)));
    let peers = snapshot
        .peers
        .objects()
        .filter(|(_, seen)| is_mesh_peer(seen) && !is_of_this_cluster(seen));
    Inputs {
        node: Node {
            name: config.node_name.clone(),
            public_key: PublicKey::new([0; 32]),
            wireguard_ips: BTreeSet::new(),
            device: config.interface.clone(),
            listen_port: 0,
            mtu: 0,
            underlay: config.interface.clone(),
            underlay_addresses: BTreeSet::new(),
            internal_ips: own.internal_ips.iter().copied().collect(),
            pod_cidrs: own.pod_cidrs.clone(),
        },
        throw: BTreeSet::new(),
        peer_mtus: Default::default(),
        api_servers: snapshot
            .api_servers
            .objects()
            .flat_map(|(_, sockets)| sockets)
            .chain(&server)
            .copied()
            .collect(),
        all_node_addresses: node_addresses.map(|ip| ip.to_canonical()).collect(),
        own_sources: BTreeSet::new(),
        pod_cidrs_of_other_nodes: others().flat_map(|(_, node)| &node.pod_cidrs).copied().collect(),
        peers: peers
            .map(|(name, seen)| Peer {
                name: name.to_owned(),
                revision: seen.revision,
                public_key: PublicKey::new([0; 32]),
                preshared_key: None,
                endpoint: None,
                candidates: Vec::new(),
                keepalive: None,
                allowed_ips: seen.spec.iter().flat_map(|spec| &spec.allowed_ips).copied().collect(),
                role: PeerRole::Node,
            })
            .collect(),
        policies: snapshot
            .policies
            .objects()
            .map(|(name, seen)| (name.to_owned(), seen.spec.clone()))
            .collect(),
    }
}
