//! Measures how long a change takes to affect packets. A pod of the sandbox sends continuously.

use std::{net::SocketAddr, time::Duration};

use clustermesh_lab::{EchoWatch, GATEWAYS, Gateway, wait_until};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{
    Measured, Time,
    test_clusters::{TIMEOUT, TestClusters, now},
};

/// A flow without a reply for this time counts as closed.
const SILENCE: Duration = Duration::from_secs(1);
/// The pause between two changes, in which the first change completes, with all status updates.
const PAUSE: Duration = Duration::from_secs(3);
/// A connection that takes longer than these milliseconds lost its first SYN. TCP sends the SYN again after a second.
const LATE: u128 = 500;

impl Measured {
    /// Removes a grant and adds it again `rounds` times, then quarantines and releases the sandbox `rounds` times.
    pub(super) async fn measure_grants(&mut self, clusters: &TestClusters<'_>, rounds: u32) -> anyhow::Result<()> {
        let revoked = clusters.members_with_change(|entry| {
            entry["egress"].as_array_mut().and_then(Vec::pop);
        });
        let quarantined = clusters.members_with_change(|entry| entry["quarantine"] = json!(true));
        self.toggle(clusters, rounds, &revoked, [Time::Revoked, Time::Granted])
            .await?;
        self.toggle(clusters, rounds, &quarantined, [Time::Quarantined, Time::Released])
            .await
    }

    async fn toggle(
        &mut self,
        clusters: &TestClusters<'_>,
        rounds: u32,
        changed_members: &[Value],
        [closes, opens]: [Time; 2],
    ) -> anyhow::Result<()> {
        let flows = flows(clusters, &clusters.gateways().await?).await?;
        for round in 1..=rounds {
            tokio::time::sleep(PAUSE).await;
            let changed_at = clusters.apply(changed_members).await?;
            for flow in &flows {
                flow.wait_for_silence(SILENCE).await?;
            }
            tokio::time::sleep(PAUSE).await;
            // A late reply may still have come during the pause, so take the last reply only now.
            let last_replies = flows.iter().filter_map(|flow| flow.echo_times().pop());
            let closed_after: Vec<u128> = last_replies.map(|at| at.saturating_sub(changed_at)).collect();
            let changed_at = clusters.apply(&clusters.members).await?;
            let mut open_after = Vec::new();
            for flow in &flows {
                open_after.push(flow.wait_for_echo_after(changed_at).await? - changed_at);
            }
            eprintln!("bench: round {round} of {rounds}: {closes:?} {closed_after:?} ms, {opens:?} {open_after:?} ms");
            closed_after.into_iter().for_each(|time| self.add(closes, time));
            open_after.into_iter().for_each(|time| self.add(opens, time));
        }
        Ok(())
    }

    /// In each round kills the process of one gateway, then deletes its pod; the gateways take turns. Each round needs a new pod, because
    /// the kubelet waits longer before each further restart of a container.
    pub(super) async fn measure_gateways(&mut self, clusters: &TestClusters<'_>, rounds: u32) -> anyhow::Result<()> {
        for round in 1..=rounds {
            let gateways = clusters.gateways().await?;
            let gateway = &gateways[round as usize % gateways.len()];
            self.restart(clusters, gateway).await?;
            self.replace(clusters, gateway).await?;
            // In `Time`, the times of gateways begin with `Restarted`.
            let of_gateways = self.times.iter().filter(|(time, _)| **time >= Time::Restarted);
            let newest: Vec<_> = of_gateways.map(|(time, values)| (time, values.last())).collect();
            eprintln!("bench: round {round} of {rounds}, {}: {newest:?}", gateway.name);
        }
        Ok(())
    }

    async fn restart(&mut self, clusters: &TestClusters<'_>, gateway: &Gateway) -> anyhow::Result<()> {
        let flow = flows(clusters, std::slice::from_ref(gateway)).await?.remove(0);
        tokio::time::sleep(PAUSE).await;
        let pod = clusters.gateway_pod(&gateway.name).await?;
        let key = clusters.status(&gateway.name).await?["publicKey"].clone();
        let (peers_before, old) = (clusters.peer_versions().await?, clusters.gateway_pid(&pod)?);
        let changed_at = now();
        kill(Pid::from_raw(old), Signal::SIGKILL)?;
        wait_until("the next process", TIMEOUT, async || match clusters.gateway_pid(&pod) {
            Ok(new) if new != old => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .await?;
        let (_, answered) = longest_silence(&flow, changed_at).await?;
        self.add(Time::Restarted, answered - changed_at);
        tokio::time::sleep(PAUSE).await;
        let peers_after = clusters.peer_versions().await?;
        let written = peers_after
            .iter()
            .filter(|(name, version)| peers_before.get(*name) != Some(version));
        self.peers_written += written.count();
        self.keys_changed += u32::from(clusters.status(&gateway.name).await?["publicKey"] != key);
        Ok(())
    }

    async fn replace(&mut self, clusters: &TestClusters<'_>, gateway: &Gateway) -> anyhow::Result<()> {
        let flow = flows(clusters, std::slice::from_ref(gateway)).await?.remove(0);
        let connections = clusters
            .lab
            .watch_connections(&clusters.sandbox_pod, clusters.mirrored_service().await?)?;
        tokio::time::sleep(PAUSE).await;
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"));
        let pods: Api<DynamicObject> = Api::namespaced_with(clusters.hub.client().await?, GATEWAYS, &kind);
        let old = pods.get(&gateway.name).await?.metadata.uid;
        let changed_at = now();
        pods.delete(&gateway.name, &DeleteParams::default()).await?;
        wait_until("the next pod's status", TIMEOUT, async || {
            let status = clusters
                .status(&gateway.name)
                .await
                .map_err(|error| error.to_string())?;
            match status["podUID"].as_str().map(str::to_owned) {
                Some(new) if Some(&new) != old.as_ref() => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await?;
        let (silence, answered) = longest_silence(&flow, changed_at).await?;
        self.add(Time::Replaced, answered - changed_at);
        self.add(Time::ReplacedSilent, silence);
        clusters
            .hub
            .wait_for_rollout(GATEWAYS, &format!("statefulset/{GATEWAYS}"))
            .await?;
        // A connection that is not established by the end of this pause counts as lost.
        tokio::time::sleep(PAUSE * 2).await;
        let attempts = connections.attempts();
        let attempts = attempts.into_iter().filter(|(began, _)| *began >= changed_at);
        // The longest wait, and how long after the change the last late attempt began.
        let (mut longest_wait, mut last_late) = (0, 0);
        for (began, opened) in attempts {
            self.connections += 1;
            // The probe gives up after three seconds.
            let wait = opened.map_or(3000, |opened| opened.saturating_sub(began));
            self.connections_lost += u64::from(opened.is_none());
            longest_wait = longest_wait.max(wait);
            if wait > LATE {
                last_late = began - changed_at;
            }
        }
        self.add(Time::ConnectionWaited, longest_wait);
        self.add(Time::ConnectionLate, last_late);
        Ok(())
    }
}

/// Starts a flow from the sandbox's pod to the echo server through each gateway, and waits for a reply.
async fn flows(clusters: &TestClusters<'_>, gateways: &[Gateway]) -> anyhow::Result<Vec<EchoWatch>> {
    let port = clusters.port("echo").await?;
    let mut flows = Vec::new();
    for gateway in gateways {
        let flow = clusters
            .lab
            .watch_udp(&clusters.sandbox_pod, SocketAddr::new(gateway.wireguard, port))?;
        flow.wait_for_echo_after(now()).await?;
        flows.push(flow);
    }
    Ok(flows)
}

/// Waits for a reply. Returns the length of the longest time without a reply after `since`, and when it ended.
async fn longest_silence(flow: &EchoWatch, since: u128) -> anyhow::Result<(u128, u128)> {
    flow.wait_for_echo_after(now()).await?;
    // The longest silence has ended if replies continue for this time.
    tokio::time::sleep(SILENCE).await;
    let echoes: Vec<u128> = flow.echo_times().into_iter().filter(|at| *at >= since).collect();
    let starts = std::iter::once(&since).chain(&echoes);
    let silences = starts.zip(&echoes).map(|(start, end)| (end - start, *end));
    silences.max().ok_or_else(|| anyhow::anyhow!("no answer"))
}
