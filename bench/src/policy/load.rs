//! Measures throughput and round trips from a sandbox through a gateway, with several numbers of grants in the gateway's table. For
//! comparison, measures them from a cluster-meshed member, too. Also measures the resources of idle gateways.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::Context;
use clustermesh_lab::{Gateway, TrafficClient, wait_until};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ListParams, PostParams},
};
use serde_json::{Value, json};

use crate::cpu::{Cpu, resident};

use super::{
    quantile,
    test_clusters::{ECHO_PORT, EGRESS_GRANTS, LOAD_PORT, TIMEOUT, TestClusters, objects},
};

/// Numbers of grants in the table of every gateway, including those of the measured sandbox.
const GRANTS: [usize; 3] = [EGRESS_GRANTS, 100, 10_000];
/// The maximum number of grants that the schema allows in one SandboxAccess.
const MAX_GRANTS_PER_ACCESS: usize = 2048;
const IDLE_SECONDS: u32 = 60;
const FILLER: &str = "filler";

#[derive(Debug, Clone, serde::Serialize)]
pub(super) struct Sample {
    /// Number of grants in the gateway's table; `None` = the cluster-meshed member.
    pub(super) grants: Option<usize>,
    /// One TCP stream.
    pub(super) gigabits_per_second: f64,
    /// Percentiles of round trips, in microseconds.
    pub(super) p50: f64,
    pub(super) p99: f64,
    /// VmRSS of the gateway, bytes.
    pub(super) resident: Option<f64>,
    /// Seconds from the first write of the added grants until the status of every gateway counts them. If a gateway did not serve the
    /// last SandboxAccess in time, the deletion of that SandboxAccess is included.
    pub(super) applied: Option<f64>,
}

/// The resources of a gateway while no sandbox sends.
#[derive(Debug, serde::Serialize)]
pub(super) struct Idle {
    pub(super) gateway: String,
    /// VmRSS, bytes.
    pub(super) resident: f64,
    /// CPU seconds used in `seconds`.
    pub(super) cpu: f64,
    pub(super) seconds: u32,
}

#[allow(clippy::cast_precision_loss, reason = "a process has less than 2^52 bytes")]
fn memory(pid: u32) -> anyhow::Result<f64> {
    Ok(resident(pid)? as f64)
}

pub(super) async fn idle(clusters: &TestClusters<'_>) -> anyhow::Result<Vec<Idle>> {
    let mut before = Vec::new();
    for gateway in clusters.gateways().await? {
        let pod = clusters.gateway_pod(&gateway.name).await?;
        let pid = u32::try_from(clusters.gateway_pid(&pod)?)?;
        before.push((gateway.name, pid, Cpu::now(&[pid])?));
    }
    tokio::time::sleep(Duration::from_secs(IDLE_SECONDS.into())).await;
    let used = before.into_iter().map(|(gateway, pid, before)| {
        Ok(Idle {
            gateway,
            resident: memory(pid)?,
            cpu: Cpu::now(&[pid])?.since(before).daemons,
            seconds: IDLE_SECONDS,
        })
    });
    used.collect()
}

pub(super) async fn throughput(clusters: &TestClusters<'_>, seconds: u32, rounds: u32) -> anyhow::Result<Vec<Sample>> {
    let (load, echo) = (clusters.port("load").await?, clusters.port("echo").await?);
    let gateways = clusters.gateways().await?;
    let mut chosen = None;
    for gateway in &gateways {
        let pod = clusters.gateway_pod(&gateway.name).await?;
        // Choose the gateway on the server's node, because the cluster-meshed member's tunnel ends on that node, too.
        if pod.node == clusters.server.node {
            chosen = Some((gateway, u32::try_from(clusters.gateway_pid(&pod)?)?));
        }
    }
    let (gateway, pid) = chosen.context("no gateway on the server's node")?;
    let mut samples = Vec::new();
    let client = clusters.hub.client().await?;
    let mut fillers = Fillers {
        clusters,
        accesses: objects(client, "SandboxAccess", "sandboxaccesses", None),
        gateways: gateways.clone(),
        count: 0,
        grants: EGRESS_GRANTS,
    };
    for grants in GRANTS {
        let applied = fillers.grow(grants).await?;
        for round in 1..=rounds {
            let through = [load, echo].map(|port| SocketAddr::new(gateway.wireguard, port));
            let direct = [LOAD_PORT, ECHO_PORT].map(|port| SocketAddr::new(clusters.server.ip, port));
            let mut sandbox = sample(clusters, &clusters.sandbox_pod, through, seconds).await?;
            sandbox.grants = Some(fillers.grants);
            sandbox.resident = Some(memory(pid)?);
            sandbox.applied = (grants > EGRESS_GRANTS).then_some(applied);
            let member = sample(clusters, &clusters.member_pod, direct, seconds).await?;
            eprintln!("bench: round {round} of {rounds}: sandbox {sandbox:?}, cluster-meshed member {member:?}");
            samples.extend([sandbox, member]);
        }
    }
    let all = ListParams::default().labels(&format!("bench={FILLER}"));
    fillers
        .accesses
        .delete_collection(&DeleteParams::default(), &all)
        .await?;
    fillers.grants = EGRESS_GRANTS;
    fillers.wait_until_applied().await?;
    Ok(samples)
}

/// Additional SandboxAccesses of sandboxes without nodes, whose grants nothing uses.
struct Fillers<'a> {
    clusters: &'a TestClusters<'a>,
    accesses: Api<DynamicObject>,
    gateways: Vec<Gateway>,
    /// Number of additional SandboxAccesses so far.
    count: usize,
    /// Number of grants, including those of the measured sandbox.
    grants: usize,
}

impl Fillers<'_> {
    /// Adds SandboxAccesses one at a time, each after the previous one is applied, until every gateway serves `to` grants, or a
    /// gateway does not serve the last SandboxAccess in time. In the second case, deletes that SandboxAccess. Returns the
    /// duration in seconds.
    async fn grow(&mut self, to: usize) -> anyhow::Result<f64> {
        let began = Instant::now();
        while self.grants < to {
            let name = format!("{FILLER}-{}", self.count);
            let added = MAX_GRANTS_PER_ACCESS.min(to - self.grants);
            let grant =
                |port: usize| json!({"service": {"namespace": "default", "name": "web"}, "gatewayPort": 1024 + port});
            let grants: Vec<Value> = (0..added).map(grant).collect();
            let access = serde_json::from_value(json!({
                "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "SandboxAccess",
                "metadata": {"name": name, "labels": {"bench": FILLER}},
                "spec": {"sandbox": name, "networks": [format!("100.126.{}.0/24", self.count)], "grants": grants},
            }))?;
            self.accesses.create(&PostParams::default(), &access).await?;
            self.count += 1;
            self.grants += added;
            if let Err(error) = self.wait_until_applied().await {
                eprintln!("bench: {} grants are too many: {error}", self.grants);
                self.accesses.delete(&name, &DeleteParams::default()).await?;
                self.grants -= added;
                self.wait_until_applied().await?;
                break;
            }
        }
        Ok(began.elapsed().as_secs_f64())
    }

    async fn wait_until_applied(&self) -> anyhow::Result<()> {
        for gateway in &self.gateways {
            let what = format!("{} to serve {} grants", gateway.name, self.grants);
            wait_until(what, TIMEOUT, async || {
                let status = self.clusters.status(&gateway.name).await;
                let status = status.map_err(|error| error.to_string())?;
                if status["grants"] == self.grants {
                    Ok(())
                } else {
                    Err(format!("{}: {}", status["grants"], status["message"]))
                }
            })
            .await?;
        }
        Ok(())
    }
}

async fn sample(
    clusters: &TestClusters<'_>,
    from: &TrafficClient,
    [load, echo]: [SocketAddr; 2],
    seconds: u32,
) -> anyhow::Result<Sample> {
    let (trip_seconds, seconds) = ((f64::from(seconds) / 2.0).to_string(), seconds.to_string());
    let (host, port) = (load.ip().to_string(), load.port().to_string());
    let args = ["iperf3", "-J", "-c", &host, "-p", &port, "-t", &seconds];
    let args = [&args[..], &["--connect-timeout", "5000"]].concat();
    let bits_per_second = wait_until(format!("iperf3 from {from}"), TIMEOUT, async || {
        let run = clusters
            .lab
            .run_at(from, &args)
            .await
            .map_err(|error| error.to_string())?;
        let report: Value = serde_json::from_str(&run.stdout).map_err(|error| format!("{error}: {run:?}"))?;
        report["end"]["sum_received"]["bits_per_second"]
            .as_f64()
            .ok_or_else(|| report["error"].to_string())
    })
    .await?;
    let (probe, socket) = (clusters.lab.probe_program()?, echo.to_string());
    let trips = clusters
        .lab
        .run_at(from, &[&probe, "udp-trips", &socket, &trip_seconds])
        .await?;
    let mut trips: Vec<u128> = trips.stdout.lines().filter_map(|line| line.parse().ok()).collect();
    anyhow::ensure!(!trips.is_empty(), "no echo from {echo} to {from}");
    trips.sort_unstable();
    #[allow(clippy::cast_precision_loss, reason = "microseconds")]
    let [p50, p99] = [0.5, 0.99].map(|share| quantile(&trips, share) as f64);
    Ok(Sample {
        grants: None,
        gigabits_per_second: bits_per_second / 1e9,
        p50,
        p99,
        resident: None,
        applied: None,
    })
}
