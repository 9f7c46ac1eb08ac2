//! Runs the probes: one Kubernetes Job for each source, with the image of wg-agent. If this program is killed, the cluster removes
//! the Jobs (`activeDeadlineSeconds`, `ttlSecondsAfterFinished`).

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{BuildHasher, RandomState},
    io::Write,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use k8s_openapi::api::{batch::v1 as batch, core::v1::Pod};
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, LogParams, PostParams, PropagationPolicy},
};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::{Cluster, ProbeSource, Report, sockets::Socket, sockets::Sockets};
use crate::{
    args::VerifyArgs,
    live::{error_chain, with_timeout},
    plan::PlanResult,
};

/// The label `app.kubernetes.io/name` of the agent's pods in `deploy/agent.yaml`.
const AGENT_NAME: &str = "wg-agent";
/// The time for a pod to be scheduled, to pull its image and to start.
const START_TIMEOUT: Duration = Duration::from_secs(90);
/// The interval at which pods and Jobs are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(400);
/// Timeout of the deletion of one Job.
const DELETE_TIMEOUT: Duration = Duration::from_secs(30);
/// The size limit of all arguments of one Job together, in bytes. etcd accepts requests of 1.5 MiB.
const MAX_ARGUMENTS: usize = 1 << 20;

/// One Job that probes from one source.
pub(super) struct Job<'o> {
    pub(super) source: ProbeSource,
    /// The sockets to probe, each with the name of its cluster.
    pub(super) sockets: BTreeMap<SocketAddr, (&'o str, Socket)>,
    /// The mesh's WireGuard device on the node.
    pub(super) device: String,
    client: Client,
    name: String,
    namespace: String,
    manifest: Box<batch::Job>,
}

/// The results of one Job.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) source: ProbeSource,
    /// The addresses of the pod. Empty for a pod in the host network.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) by_socket: BTreeMap<SocketAddr, Answer>,
}

/// The result for one socket, as `wg-agent probe` prints it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Answer {
    /// `open`, `refused`, `unreachable`, `silent` or an error.
    #[serde(rename = "answer")]
    pub(super) outcome: String,
    /// The interface by which the probe's packets to the socket leave its network namespace. `None` = no route, or an address of the
    /// namespace itself. Only a probe in the host network shows the node's route.
    #[serde(rename = "way")]
    pub(super) interface: Option<String>,
}

/// One line of the output of `wg-agent probe`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Answer {
        socket: SocketAddr,
        #[serde(flatten)]
        answer: Answer,
    },
    Done {
        tried: usize,
    },
}

/// Builds the Jobs that run in the cluster `from` and probe sockets of other clusters. Adds a note if
/// `from` has more Ready Nodes than `--nodes`.
pub(super) fn build<'o>(
    from: &Cluster<'o>,
    plan_result: &PlanResult,
    args: &VerifyArgs,
    sockets_by_cluster: &[(&'o str, Sockets)],
    report: &mut Report,
) -> Result<Vec<Job<'o>>, String> {
    let name = from.name;
    let client = plan_result.clients.get(from.identity).ok_or_else(|| {
        format!(
            "cluster {name:?}: nothing is probed from it, because this program has no credentials for it; name a context with \
             --member-context"
        )
    })?;
    let sockets: BTreeMap<SocketAddr, (&str, Socket)> = sockets_by_cluster
        .iter()
        .flat_map(|(to, sockets)| {
            sockets
                .iter()
                .map(move |(address, socket)| (*address, (*to, socket.clone())))
        })
        .collect();
    if sockets.is_empty() {
        return Ok(Vec::new());
    }
    let agent = AgentInstallation::find(from, args);
    let image = agent.image.clone().ok_or_else(|| {
        format!(
            "cluster {name:?}: nothing is probed from it, because no pod of wg-agent shows the agent's image; name an image with \
             --image"
        )
    })?;
    let nodes: Vec<&str> = from
        .read
        .member
        .nodes
        .iter()
        .filter(|(_, node)| node.ready && !node.deleting)
        .map(|(name, _)| name)
        .collect();
    if nodes.is_empty() {
        return Err(format!(
            "cluster {name:?}: nothing is probed from it, because no Node is Ready"
        ));
    }
    let max_nodes = args.nodes.get();
    if nodes.len() > max_nodes {
        report.notes.push(format!(
            "probes run from {max_nodes} of {} Ready Nodes of {name:?}; --nodes sets the number",
            nodes.len()
        ));
    }
    // Each `RandomState` has random keys, so each run has another id.
    let run_id = RandomState::new().hash_one(name);
    let mut jobs = Vec::new();
    for (number, node) in nodes.into_iter().take(max_nodes).enumerate() {
        let has_v6 = from.read.member.nodes[node].internal_ips.iter().any(IpAddr::is_ipv6);
        let has_v4 = from.read.member.nodes[node].internal_ips.iter().any(IpAddr::is_ipv4);
        let has_family = |address: &SocketAddr| if address.is_ipv4() { has_v4 } else { has_v6 };
        let sockets: BTreeMap<_, _> = sockets
            .iter()
            .filter(|(address, _)| has_family(address))
            .map(|(address, socket)| (*address, socket.clone()))
            .collect();
        let arguments = probe_arguments(sockets.keys());
        if arguments.iter().map(String::len).sum::<usize>() > MAX_ARGUMENTS {
            return Err(format!(
                "cluster {name:?}: {} sockets are too many for one pod; probe fewer clusters with --to",
                sockets.len()
            ));
        }
        for is_host in [true, false] {
            let source = ProbeSource {
                cluster: name.to_owned(),
                node: node.to_owned(),
                is_host,
            };
            let job_name = format!(
                "clustermesh-verify-{run_id:016x}-{number}-{}",
                if is_host { "node" } else { "pod" }
            );
            jobs.push(Job {
                manifest: Box::new(manifest(&job_name, &source, &image, &agent, &arguments)),
                source,
                sockets: sockets.clone(),
                device: agent.device.clone(),
                client: client.clone(),
                name: job_name,
                namespace: agent.namespace.clone(),
            });
        }
    }
    Ok(jobs)
}

/// Returns one argument of `wg-agent probe` for each address: `10.0.0.1=80,443`.
fn probe_arguments<'s>(sockets: impl Iterator<Item = &'s SocketAddr>) -> Vec<String> {
    let mut ports: BTreeMap<IpAddr, BTreeSet<u16>> = BTreeMap::new();
    for socket in sockets {
        ports.entry(socket.ip()).or_default().insert(socket.port());
    }
    let argument = |(address, ports): (IpAddr, BTreeSet<u16>)| {
        let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
        format!("{address}={}", ports.join(","))
    };
    ports.into_iter().map(argument).collect()
}

/// The installation of wg-agent in a cluster: what its first pod shows, or the defaults. `--image` replaces the image.
struct AgentInstallation {
    namespace: String,
    image: Option<String>,
    pull_secrets: Vec<serde_json::Value>,
    /// The WireGuard device.
    device: String,
}

impl AgentInstallation {
    fn find(from: &Cluster<'_>, args: &VerifyArgs) -> Self {
        let mut agents = from.read.objects.pods.iter().filter_map(|(name, pod)| {
            let labels = pod.metadata.labels.as_ref()?;
            let spec = pod.spec.as_ref()?;
            let is_agent = labels
                .get("app.kubernetes.io/name")
                .is_some_and(|name| name == AGENT_NAME);
            let container = spec.containers.first().filter(|_| is_agent)?;
            Some((name, spec, container))
        });
        let agent = agents.next();
        let device = agent.as_ref().and_then(|(_, _, container)| {
            let mut args = container.args.iter().flatten();
            args.find_map(|arg| arg.strip_prefix("--interface=").map(str::to_owned))
        });
        let pull_secrets = agent.as_ref().and_then(|(_, spec, _)| spec.image_pull_secrets.as_ref());
        Self {
            namespace: agent
                .as_ref()
                .map_or_else(|| "clustermesh-agent".to_owned(), |(name, ..)| name.namespace.clone()),
            image: args
                .image
                .clone()
                .or_else(|| agent.as_ref().and_then(|(_, _, container)| container.image.clone())),
            pull_secrets: pull_secrets
                .into_iter()
                .flatten()
                .map(|secret| json!({"name": secret.name}))
                .collect(),
            device: device.unwrap_or_else(|| "kilo0".to_owned()),
        }
    }
}

fn manifest(
    name: &str,
    source: &ProbeSource,
    image: &str,
    agent: &AgentInstallation,
    arguments: &[String],
) -> batch::Job {
    let labels = json!({
        "app.kubernetes.io/name": "clustermesh-verify",
        "app.kubernetes.io/part-of": "clustermesh",
    });
    let args: Vec<&str> = std::iter::once("probe")
        .chain(arguments.iter().map(String::as_str))
        .collect();
    let job = json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": agent.namespace, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            // If this program is killed, the cluster ends the pod and removes the Job.
            "activeDeadlineSeconds": (START_TIMEOUT + probe_timeout(arguments)).as_secs(),
            "ttlSecondsAfterFinished": 300,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "nodeName": source.node,
                    "hostNetwork": source.is_host,
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": false,
                    "enableServiceLinks": false,
                    "terminationGracePeriodSeconds": 0,
                    "tolerations": [{"operator": "Exists"}],
                    "imagePullSecrets": agent.pull_secrets,
                    "securityContext": {
                        "runAsNonRoot": true,
                        "runAsUser": 65532,
                        "runAsGroup": 65532,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [{
                        "name": "probe",
                        "image": image,
                        "imagePullPolicy": "IfNotPresent",
                        "args": args,
                        "securityContext": {
                            "allowPrivilegeEscalation": false,
                            "readOnlyRootFilesystem": true,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }],
                },
            },
        },
    });
    serde_json::from_value(job).expect("the JSON above is a Job")
}

/// The timeout of all probes of one pod: 30 s, and 5 s for every 400 sockets. `wg-agent probe` opens 400 connections at once, each with a
/// timeout of 2.5 s, so it should need at most half of the 5 s.
fn probe_timeout(arguments: &[String]) -> Duration {
    let sockets: usize = arguments.iter().map(|argument| argument.split(',').count()).sum();
    Duration::from_secs(30) + Duration::from_millis((sockets / 400) as u64 * 5000)
}

/// Runs all Jobs at the same time and deletes them, also after errors and interrupts. The results are in the order of the Jobs.
pub(super) async fn run(jobs: &[Job<'_>], stderr: &mut dyn Write) -> Vec<Result<Answers, String>> {
    let results = tokio::select! {
        results = futures::future::join_all(jobs.iter().map(run_job)) => results,
        () = wait_for_interrupt() => {
            let _ = writeln!(stderr, "note: interrupted; deleting the Jobs");
            jobs.iter().map(|_| Err("interrupted".to_owned())).collect()
        }
    };
    for failure in futures::future::join_all(jobs.iter().map(delete_job))
        .await
        .into_iter()
        .flatten()
    {
        let _ = writeln!(stderr, "warning: {failure}");
    }
    results
}

/// Waits for SIGINT (Ctrl-C) or SIGTERM.
async fn wait_for_interrupt() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut term) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = term.recv() => {}
    }
}

/// Creates a Job, waits for its pod to end and reads its log.
async fn run_job(job: &Job<'_>) -> Result<Answers, String> {
    let jobs: Api<batch::Job> = Api::namespaced(job.client.clone(), &job.namespace);
    let pods: Api<Pod> = Api::namespaced(job.client.clone(), &job.namespace);
    let created = with_timeout(jobs.create(&PostParams::default(), &job.manifest)).await;
    created.map_err(|why| format!("the Job cannot be created in namespace {}: {why}", job.namespace))?;
    let deadline = Instant::now() + START_TIMEOUT + probe_timeout(&probe_arguments(job.sockets.keys()));
    let pods_of_job = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={}", job.name));
    let mut last = "it has no pod yet".to_owned();
    let pod = loop {
        if Instant::now() > deadline {
            return Err(format!("the pod of the Job did not end in time: {last}"));
        }
        // A failed list is repeated until the deadline.
        match with_timeout(pods.list(&pods_of_job))
            .await
            .map(|list| list.items.into_iter().next())
        {
            Ok(Some(pod)) => match pod.status.as_ref().and_then(|status| status.phase.as_deref()) {
                Some("Succeeded") => break pod,
                Some("Failed") => return Err(failure_reason(&pods, &pod).await),
                _ => last = waiting_reason(&pod),
            },
            Ok(None) => {}
            Err(why) => last = why,
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    let name = pod.metadata.name.clone().unwrap_or_default();
    let text = with_timeout(pods.logs(&name, &LogParams::default())).await;
    let text = text.map_err(|why| format!("the log of pod {}/{name} cannot be read: {why}", job.namespace))?;
    let addresses = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
    let addresses = addresses
        .filter_map(|ip| ip.ip.parse().ok())
        .filter(|_| !job.source.is_host);
    Ok(Answers {
        source: job.source.clone(),
        addresses: addresses.collect(),
        by_socket: parse_log(&text)?,
    })
}

/// Parses the log of a pod. A complete log has a line for each answer, and a line with their number.
fn parse_log(text: &str) -> Result<BTreeMap<SocketAddr, Answer>, String> {
    let mut answers = BTreeMap::new();
    let mut expected = None;
    for line in text.lines() {
        match serde_json::from_str(line) {
            Ok(Line::Answer { socket, answer }) => drop(answers.insert(socket, answer)),
            Ok(Line::Done { tried }) => expected = Some(tried),
            Err(_) => {
                return Err(format!(
                    "the pod printed an unexpected line: {line:?}; is its image as new as this program?"
                ));
            }
        }
    }
    match expected {
        Some(tried) if tried == answers.len() => Ok(answers),
        _ => Err(format!("the pod's log is incomplete: it has {} answers", answers.len())),
    }
}

/// Returns why a pod has not ended yet.
fn waiting_reason(pod: &Pod) -> String {
    let status = pod.status.as_ref();
    let containers = status
        .into_iter()
        .flat_map(|status| status.container_statuses.iter().flatten());
    let reasons = containers.filter_map(|container| container.state.as_ref()?.waiting.as_ref());
    let text = |reason: &k8s_openapi::api::core::v1::ContainerStateWaiting| {
        let part = |text: &Option<String>| text.clone().unwrap_or_default();
        format!("{} {}", part(&reason.reason), part(&reason.message))
    };
    reasons
        .map(text)
        .next()
        .unwrap_or_else(|| "it is starting or running".to_owned())
}

/// Returns why a pod failed: the message (else the reason) in its status, and the end of its log.
async fn failure_reason(pods: &Api<Pod>, pod: &Pod) -> String {
    let name = pod.metadata.name.clone().unwrap_or_default();
    let status = pod.status.as_ref();
    let reason = status.and_then(|status| status.message.clone().or_else(|| status.reason.clone()));
    let lines = LogParams {
        tail_lines: Some(3),
        ..LogParams::default()
    };
    let log = with_timeout(pods.logs(&name, &lines)).await.unwrap_or_default();
    format!(
        "the pod of the Job failed: {} {}; an image that is older than this program may not have `wg-agent probe`",
        reason.unwrap_or_default(),
        log.trim()
    )
}

/// Deletes a Job and waits until it is gone. Foreground deletion removes the pod before the Job. Returns a message if this fails.
async fn delete_job(job: &Job<'_>) -> Option<String> {
    let jobs: Api<batch::Job> = Api::namespaced(job.client.clone(), &job.namespace);
    let delete = DeleteParams {
        propagation_policy: Some(PropagationPolicy::Foreground),
        ..DeleteParams::default()
    };
    let gone = async {
        match jobs.delete(&job.name, &delete).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            Err(error) => return Err(error_chain(&error)),
            Ok(_) => {}
        }
        loop {
            match jobs.get_opt(&job.name).await {
                Ok(None) => return Ok(()),
                Ok(Some(_)) => tokio::time::sleep(POLL_INTERVAL).await,
                Err(error) => return Err(error_chain(&error)),
            }
        }
    };
    let why = match tokio::time::timeout(DELETE_TIMEOUT, gone).await {
        Ok(Ok(())) => return None,
        Ok(Err(why)) => why,
        Err(_) => format!("it still exists after {} s", DELETE_TIMEOUT.as_secs()),
    };
    Some(format!(
        "Job {}/{} of cluster {:?} could not be deleted ({why}): the cluster removes it within 10 minutes, or delete it yourself",
        job.namespace, job.name, job.source.cluster
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incomplete_pod_log_is_refused() {
        let line = r#"{"socket":"10.0.0.1:80","answer":"open","way":"kilo0"}"#;
        let answer = Answer {
            outcome: "open".to_owned(),
            interface: Some("kilo0".to_owned()),
        };
        let complete = parse_log(&format!("{line}\n{{\"tried\":1}}\n"));
        assert_eq!(complete, Ok([("10.0.0.1:80".parse().unwrap(), answer)].into()));
        for part in [line.to_owned(), format!("{line}\n{{\"tried\":2}}")] {
            assert_eq!(
                parse_log(&part),
                Err("the pod's log is incomplete: it has 1 answers".to_owned())
            );
        }
        assert!(parse_log("error: unrecognized subcommand 'probe'").is_err());
    }

    #[test]
    fn probe_argument_has_all_ports_of_an_address() {
        let sockets = ["10.0.0.1:443", "10.0.0.1:80", "[fd00::1]:22"].map(|text| text.parse().unwrap());
        assert_eq!(probe_arguments(sockets.iter()), ["10.0.0.1=80,443", "fd00::1=22"]);
    }
}
