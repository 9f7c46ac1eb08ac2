//! `clustermeshctl verify`: probes running clusters and compares the results with the plan.
//!
//! [`sockets`] collects the addresses and ports to probe, [`jobs`] probes them from pods, [`classify`] compares each answer with
//! the plan, and [`show`] prints the report.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::SocketAddr,
};

use clustermesh_core::{
    mesh::{ClusterIdentity, Profile},
    observe::AccessSpec,
};

use crate::{
    args::VerifyArgs,
    explanation::Explainer,
    inputs::ReadCluster,
    plan::{PlanResult, print},
    problem::Problem,
};

mod classify;
mod jobs;
mod show;
mod sockets;
#[cfg(test)]
mod tests;

use classify::Row;
use jobs::{Answers, Job};
pub(crate) use sockets::UnderlayAllowed;
use sockets::{ExcludedAddresses, Socket, Sockets};

/// Exit code if a socket answers that must not.
const VIOLATION: u8 = 1;
/// Exit code if there is no violation, but a socket could not be probed, or there was nothing to probe. Errors of the command have
/// the same code.
pub(crate) const CANNOT_TELL: u8 = 2;
/// Exit code if all sockets could be probed without a violation, but an allowed socket does not answer.
const UNANSWERED: u8 = 3;

/// A network namespace from which connections are opened.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct ProbeSource {
    /// The name of its cluster.
    cluster: String,
    node: String,
    /// Whether it is the host network of the Node. Otherwise it is the network of a new pod on the Node.
    is_host: bool,
}

impl std::fmt::Display for ProbeSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { cluster, node, is_host } = self;
        let kind = if *is_host { "the node itself" } else { "a pod on it" };
        write!(f, "{cluster}/{node} ({kind})")
    }
}

/// The results of all probes.
#[derive(Debug, Default)]
struct Report {
    rows: Vec<Row>,
    /// Messages about sockets that could not be probed. Unless there is a violation, the exit code is then [`CANNOT_TELL`].
    not_probed: Vec<String>,
    /// Messages about sockets that were left out on purpose.
    notes: Vec<String>,
}

impl Report {
    fn sum(&self, count: impl Fn(&Row) -> usize) -> usize {
        self.rows.iter().map(count).sum()
    }

    fn code(&self) -> u8 {
        if self.sum(|row| row.violations.len()) > 0 {
            VIOLATION
        } else if !self.not_probed.is_empty() || self.rows.is_empty() {
            CANNOT_TELL
        } else if self.sum(|row| row.unanswered.len()) > 0 {
            UNANSWERED
        } else {
            0
        }
    }
}

/// A cluster that was read.
struct Cluster<'o> {
    name: &'o str,
    identity: &'o ClusterIdentity,
    read: &'o ReadCluster,
}

/// Runs the command. Notes and warnings go to `stderr`.
///
/// # Errors
/// All errors in the input.
pub(crate) async fn run(
    args: &VerifyArgs,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> Result<u8, Vec<Problem>> {
    if !args.input.filename.is_empty() {
        let why =
            "verify needs running clusters: leave --filename out, and name the hub with --kubeconfig and --context";
        return Err(vec![Problem::other(why)]);
    }
    let outcome = PlanResult::read(&args.input, stdin, stderr).await?;
    let check_names = |flag: &str, given: &[String]| {
        let is_known = |name: &&String| outcome.inputs.names.values().any(|other| other == *name);
        let unknown: Vec<Problem> = given
            .iter()
            .filter(|name| !is_known(name))
            .map(|name| Problem::other(format!("{flag} {name}: no mesh of the hub has an entry of that name")))
            .collect();
        if unknown.is_empty() { Ok(()) } else { Err(unknown) }
    };
    check_names("--from", &args.from)?;
    check_names("--to", &args.to)?;
    let report = Verify {
        args,
        outcome: &outcome,
    }
    .report(stderr)
    .await;
    print(stdout, &show::render(&report, args.output)?)?;
    Ok(report.code())
}

/// Returns the SandboxAccesses that are planned in a cluster.
fn planned_accesses<'a>(outcome: &'a PlanResult, cluster: &ClusterIdentity) -> Vec<&'a AccessSpec> {
    let meshes = outcome.plan.meshes.values();
    let targets = meshes.flat_map(|mesh| {
        let entries = mesh.identities.iter();
        let same = entries.filter(|(_, identity)| identity.same_cluster(cluster));
        same.filter_map(|(name, _)| mesh.targets.get(name))
    });
    let accesses = targets.flat_map(|target| target.accesses.values());
    accesses.map(|access| &access.spec).collect()
}

struct Verify<'a> {
    args: &'a VerifyArgs,
    outcome: &'a PlanResult,
}

impl<'a> Verify<'a> {
    /// Returns every cluster that was read, by name.
    fn clusters(&self) -> BTreeMap<&'a str, Cluster<'a>> {
        let mut clusters = BTreeMap::new();
        for (identity, name) in &self.outcome.inputs.names {
            if let Some(read) = self.outcome.inputs.clusters.get(name) {
                clusters
                    .entry(name.as_str())
                    .or_insert(Cluster { name, identity, read });
            }
        }
        clusters
    }

    /// Whether an entry of the cluster is a sandbox, standard or quarantined. Such a cluster must not reach denied sockets on the
    /// underlay either.
    fn is_untrusted(&self, cluster: &ClusterIdentity) -> bool {
        let entries = self.outcome.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let mut entries = entries.filter(|entry| entry.identity.same_cluster(cluster));
        entries.any(|entry| entry.profile > Profile::ClusterMeshed || entry.quarantine)
    }

    async fn report(&self, stderr: &mut dyn Write) -> Report {
        let mut report = Report::default();
        let is_selected = |given: &[String], name: &str| given.is_empty() || given.iter().any(|given| given == name);
        for (identity, name) in &self.outcome.inputs.names {
            let is_needed = is_selected(&self.args.from, name) || is_selected(&self.args.to, name);
            if is_needed && self.outcome.inputs.cluster(identity).is_none() {
                report.not_probed.push(format!(
                    "cluster {name:?} could not be read: nothing is probed from it or toward it"
                ));
            }
        }
        report.not_probed.dedup();
        let clusters = self.clusters();
        let sockets: BTreeMap<&str, Sockets> = clusters
            .values()
            .filter(|cluster| is_selected(&self.args.to, cluster.name))
            .map(|cluster| {
                let accesses = planned_accesses(self.outcome, cluster.identity);
                (
                    cluster.name,
                    sockets::collect(cluster.read, &self.outcome.settings, &accesses),
                )
            })
            .collect();
        let mut jobs = Vec::new();
        for from in clusters
            .values()
            .filter(|cluster| is_selected(&self.args.from, cluster.name))
        {
            let excluded = ExcludedAddresses::new(
                from.read,
                self.allowed_networks(from.identity),
                &self.args.underlay_allows,
            );
            let selected: Vec<(&str, Sockets)> = sockets
                .iter()
                .filter(|(to, _)| **to != from.name)
                .map(|(to, all)| {
                    (
                        *to,
                        self.select_sockets(from, &clusters[to], all, &excluded, &mut report.notes),
                    )
                })
                .collect();
            match jobs::build(from, self.outcome, self.args, &selected, &mut report) {
                Ok(built) => jobs.extend(built),
                Err(why) => report.not_probed.push(why),
            }
        }
        let probes: usize = jobs.iter().map(|job| job.sockets.len()).sum();
        let _ = writeln!(
            stderr,
            "note: {} temporary pods open {probes} connections; nothing else is changed in any cluster",
            jobs.len()
        );
        let answers = jobs::run(&jobs, stderr).await;
        let interfaces = classify::interfaces_by_node(&answers);
        let explainer = self.outcome.explainer();
        for (job, answer) in jobs.iter().zip(answers) {
            match answer {
                Ok(answers) => report
                    .rows
                    .extend(self.classify(&explainer, &clusters, job, &answers, &interfaces)),
                Err(why) => report.not_probed.push(format!("{}: {why}", job.source)),
            }
        }
        report
    }

    /// Returns `allowedNetworks` of a cluster, from all meshes. The cluster's own nodes and pods have these addresses, so from this
    /// cluster, a probe of such an address would not reach another cluster.
    fn allowed_networks(&self, cluster: &ClusterIdentity) -> Vec<ipnet::IpNet> {
        let entries = self.outcome.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let entries = entries.filter(|entry| entry.identity.same_cluster(cluster));
        entries.flat_map(|entry| entry.allowed.iter().copied()).collect()
    }

    /// Selects the sockets of `to` that are probed from `from`: removes the excluded addresses, and adds the sockets of the mirrored
    /// Services in `from` whose originals are in `to`. Gateways need not answer a trusted source.
    fn select_sockets(
        &self,
        from: &Cluster<'_>,
        to: &Cluster<'_>,
        all: &Sockets,
        excluded: &ExcludedAddresses,
        notes: &mut Vec<String>,
    ) -> Sockets {
        let mut selected = all.clone();
        selected.retain(|socket, _| !excluded.contains(*socket));
        if !self.is_untrusted(from.identity) {
            // Gateways serve only sandboxes and importers of a masqueraded member, so they need not answer this cluster-meshed
            // source.
            let gateways = || to.read.member.gateways.values().flat_map(|gateway| &gateway.addresses);
            for (address, socket) in &mut selected {
                socket.should_answer &= !gateways().any(|gateway| gateway.to_canonical() == address.ip());
            }
        }
        let left_out = all.len() - selected.len();
        if left_out > 0 {
            notes.push(format!(
                "{left_out} sockets of {:?} are not probed from {:?}: their addresses also exist in {:?}, or --underlay-allows \
                 names them",
                to.name, from.name, from.name
            ));
        }
        let mut mirrors = Sockets::new();
        let accesses = planned_accesses(self.outcome, to.identity);
        for mesh in &self.outcome.meshes {
            let find_entry =
                |cluster: &ClusterIdentity| mesh.clusters.iter().find(|entry| entry.identity.same_cluster(cluster));
            let (Some(from_entry), Some(to_entry)) = (find_entry(from.identity), find_entry(to.identity)) else {
                continue;
            };
            let uses_gateways = from_entry.profile == Profile::Sandbox && !to.read.member.gateways.is_empty();
            let sandbox_accesses = uses_gateways.then_some((&*from_entry.name, &*accesses));
            for grant in from_entry.egress.iter().filter(|grant| grant.cluster == to_entry.name) {
                mirrors.extend(sockets::collect_mirrored(
                    from.read,
                    to.read,
                    &grant.local,
                    &grant.service,
                    sandbox_accesses,
                ));
            }
        }
        selected.extend(mirrors);
        selected
    }

    fn classify(
        &self,
        explainer: &Explainer<'_>,
        clusters: &BTreeMap<&str, Cluster<'_>>,
        job: &Job<'_>,
        answers: &Answers,
        interfaces: &classify::InterfacesByNode,
    ) -> Vec<Row> {
        let from = &clusters[&*job.source.cluster];
        let mut by_cluster: BTreeMap<&str, BTreeMap<SocketAddr, &Socket>> = BTreeMap::new();
        for (address, (to, socket)) in &job.sockets {
            by_cluster.entry(to).or_default().insert(*address, socket);
        }
        let classifier = classify::Classifier {
            explainer,
            source: &job.source,
            from: from.identity,
            is_underlay_checked: self.is_untrusted(from.identity),
            device: &job.device,
            answers,
            interfaces: interfaces.get(&(job.source.cluster.clone(), job.source.node.clone())),
        };
        let rows = by_cluster
            .into_iter()
            .map(|(to, sockets)| classifier.classify(to, clusters[to].identity, &sockets));
        rows.collect()
    }
}
