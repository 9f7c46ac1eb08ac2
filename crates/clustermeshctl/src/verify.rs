//! `clustermeshctl verify`: what the planner says may be reached from each member, tried for real. What is tried is in
//! [`sockets`], by which pods in [`jobs`], what an answer means in [`judge`], how it is told in [`show`].

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{IpAddr, SocketAddr},
};

use clustermesh_core::{
    mesh::{ClusterIdentity, Profile},
    observe::AccessSpec,
};

use crate::{
    args::VerifyArgs,
    plan::{Outcome, print},
    problem::Problem,
    world::Seen,
};

mod jobs;
mod judge;
mod show;
mod sockets;
#[cfg(test)]
mod tests;

use jobs::{Answers, Job};
use judge::Row;
pub(crate) use sockets::Allowed;
use sockets::{Own, Socket, Sockets};

/// Exit code where something answers that nothing grants.
const VIOLATION: u8 = 1;
/// Exit code where something could not be tried, errors included.
pub(crate) const CANNOT_TELL: u8 = 2;
/// Exit code where all is closed that has to be, and something that is granted does not answer.
const UNANSWERED: u8 = 3;

/// One place that connections are opened from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    /// What its cluster is called.
    cluster: String,
    node: String,
    /// The Node itself; else a pod of its own on it.
    host: bool,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { cluster, node, host } = self;
        let words = if *host { "the node itself" } else { "a pod on it" };
        write!(f, "{cluster}/{node} ({words})")
    }
}

/// Everything that is told.
#[derive(Debug, Default)]
struct Report {
    rows: Vec<Row>,
    /// What was not tried, and why: the exit code says so.
    missing: Vec<String>,
    /// What was left out on purpose.
    notes: Vec<String>,
}

impl Report {
    fn count(&self, of: impl Fn(&Row) -> usize) -> usize {
        self.rows.iter().map(of).sum()
    }

    fn code(&self) -> u8 {
        if self.count(|row| row.violations.len()) > 0 {
            VIOLATION
        } else if !self.missing.is_empty() || self.rows.is_empty() {
            CANNOT_TELL
        } else if self.count(|row| row.unanswered.len()) > 0 {
            UNANSWERED
        } else {
            0
        }
    }
}

/// One cluster that is asked or answers.
struct Cluster<'o> {
    name: &'o str,
    identity: &'o ClusterIdentity,
    seen: &'o Seen,
}

/// Runs the command. Notes and warnings go to `stderr`.
///
/// # Errors
/// Everything that has to be mended before anything can be tried.
pub(crate) async fn run(
    args: &VerifyArgs,
    stdin: &mut dyn Read,
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> Result<u8, Vec<Problem>> {
    if !args.given.filename.is_empty() {
        let why =
            "verify tries running clusters: leave --filename out, and name the hub with --kubeconfig and --context";
        return Err(vec![Problem::usage(why)]);
    }
    let outcome = Outcome::read(&args.given, stdin, stderr).await?;
    let names = |flag: &str, given: &[String]| {
        let known = |name: &&String| outcome.world.sources.values().any(|other| other == *name);
        let unknown: Vec<Problem> = given
            .iter()
            .filter(|name| !known(name))
            .map(|name| Problem::usage(format!("{flag} {name}: no mesh of the hub has an entry of that name")))
            .collect();
        if unknown.is_empty() { Ok(()) } else { Err(unknown) }
    };
    names("--from", &args.from)?;
    names("--to", &args.to)?;
    let report = Verify {
        args,
        outcome: &outcome,
    }
    .report(stderr)
    .await;
    print(stdout, &show::render(&report, args.output)?)?;
    Ok(report.code())
}

/// SandboxAccesses that are planned in a cluster.
fn accesses<'a>(outcome: &'a Outcome, cluster: &ClusterIdentity) -> Vec<&'a AccessSpec> {
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
    outcome: &'a Outcome,
}

impl<'a> Verify<'a> {
    /// Every cluster that was seen, once.
    fn clusters(&self) -> BTreeMap<&'a str, Cluster<'a>> {
        let mut clusters = BTreeMap::new();
        for (identity, name) in &self.outcome.world.sources {
            if let Some(seen) = self.outcome.world.given.get(name) {
                clusters
                    .entry(name.as_str())
                    .or_insert(Cluster { name, identity, seen });
            }
        }
        clusters
    }

    /// Whether nothing but what is granted may be open to it, on the underlay too.
    fn confined(&self, cluster: &ClusterIdentity) -> bool {
        let entries = self.outcome.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let mut entries = entries.filter(|entry| entry.identity.same_cluster(cluster));
        entries.any(|entry| entry.profile > Profile::ClusterMeshed || entry.quarantine)
    }

    async fn report(&self, stderr: &mut dyn Write) -> Report {
        let mut report = Report::default();
        let asked = |given: &[String], name: &str| given.is_empty() || given.iter().any(|one| one == name);
        for (identity, name) in &self.outcome.world.sources {
            let part = asked(&self.args.from, name) || asked(&self.args.to, name);
            if part && self.outcome.world.seen(identity).is_none() {
                report.missing.push(format!(
                    "cluster {name:?} was not seen: nothing is tried from it or toward it"
                ));
            }
        }
        report.missing.dedup();
        let clusters = self.clusters();
        let sockets: BTreeMap<&str, Sockets> = clusters
            .values()
            .filter(|cluster| asked(&self.args.to, cluster.name))
            .map(|cluster| {
                let accesses = accesses(self.outcome, cluster.identity);
                (
                    cluster.name,
                    sockets::of(cluster.seen, &self.outcome.settings, &accesses),
                )
            })
            .collect();
        let mut jobs = Vec::new();
        for from in clusters.values().filter(|cluster| asked(&self.args.from, cluster.name)) {
            let own = Own::of(from.seen, self.networks(from.identity), &self.args.underlay_allows);
            let targets: Vec<(&str, Sockets)> = sockets
                .iter()
                .filter(|(to, _)| **to != from.name)
                .map(|(to, all)| (*to, self.tried(from, &clusters[to], all, &own, &mut report.notes)))
                .collect();
            match jobs::on(from, self.outcome, self.args, &targets, &mut report) {
                Ok(found) => jobs.extend(found),
                Err(why) => report.missing.push(why),
            }
        }
        let tried: usize = jobs.iter().map(|job| job.sockets.len()).sum();
        let _ = writeln!(
            stderr,
            "note: {} pods try {tried} connections, and go again; nothing else is changed in any cluster",
            jobs.len()
        );
        let answers = jobs::run(&jobs, stderr).await;
        let ways = judge::ways(&answers);
        for (job, answer) in jobs.iter().zip(answers) {
            match answer {
                Ok(answers) => report.rows.extend(self.judged(&clusters, job, &answers, &ways)),
                Err(why) => report.missing.push(format!("{}: {why}", job.place)),
            }
        }
        report
    }

    /// Networks in which addresses mean something else for this cluster's own pods.
    fn networks(&self, cluster: &ClusterIdentity) -> Vec<ipnet::IpNet> {
        let entries = self.outcome.meshes.iter().flat_map(|mesh| &mesh.clusters);
        let entries = entries.filter(|entry| entry.identity.same_cluster(cluster));
        entries.flat_map(|entry| entry.allowed.iter().copied()).collect()
    }

    /// Of the sockets of one cluster those that mean it also for another, with the mirrors that stand there.
    fn tried(
        &self,
        from: &Cluster<'_>,
        to: &Cluster<'_>,
        all: &Sockets,
        own: &Own,
        notes: &mut Vec<String>,
    ) -> Sockets {
        let mut tried = all.clone();
        tried.retain(|socket, _| !own.means_itself(*socket));
        if !self.confined(from.identity) {
            // Gateways serve sandboxes alone.
            let gateways = || to.seen.member.gateways.values().flat_map(|gateway| &gateway.addresses);
            for (at, socket) in &mut tried {
                socket.serving &= !gateways().any(|address| address.to_canonical() == at.ip());
            }
        }
        let left_out = all.len() - tried.len();
        if left_out > 0 {
            notes.push(format!(
                "{left_out} sockets of {:?} are not tried from {:?}: their addresses mean something of its own there, or \
                 --underlay-allows names them",
                to.name, from.name
            ));
        }
        let mut mirrors = Sockets::new();
        let accesses = accesses(self.outcome, to.identity);
        for mesh in &self.outcome.meshes {
            let entry = |of: &ClusterIdentity| mesh.clusters.iter().find(|entry| entry.identity.same_cluster(of));
            let (Some(source), Some(target)) = (entry(from.identity), entry(to.identity)) else {
                continue;
            };
            let through_gateways = source.profile == Profile::Sandbox && !to.seen.member.gateways.is_empty();
            let sandbox = through_gateways.then_some((&*source.name, &*accesses));
            for grant in source.egress.iter().filter(|grant| grant.cluster == target.name) {
                mirrors.extend(sockets::mirror(
                    from.seen,
                    to.seen,
                    &grant.local,
                    &grant.service,
                    sandbox,
                ));
            }
        }
        tried.extend(mirrors);
        tried
    }

    fn judged(
        &self,
        clusters: &BTreeMap<&str, Cluster<'_>>,
        job: &Job<'_>,
        answers: &Answers,
        ways: &BTreeMap<(String, String), BTreeMap<IpAddr, Option<String>>>,
    ) -> Vec<Row> {
        let from = &clusters[&*job.place.cluster];
        let mut by_target: BTreeMap<&str, BTreeMap<SocketAddr, &Socket>> = BTreeMap::new();
        for (socket, (to, what)) in &job.sockets {
            by_target.entry(to).or_default().insert(*socket, what);
        }
        let judge = judge::Judge {
            outcome: self.outcome,
            place: &job.place,
            from: from.identity,
            confined: self.confined(from.identity),
            device: &job.device,
            answers,
            ways: ways.get(&(job.place.cluster.clone(), job.place.node.clone())),
        };
        let rows = by_target
            .into_iter()
            .map(|(to, sockets)| judge.row(to, clusters[to].identity, &sockets));
        rows.collect()
    }
}
