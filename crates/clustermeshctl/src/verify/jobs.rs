//! The pods that try: one Job for each place, with the agent's own image, which the cluster takes away by itself where this
//! program cannot. What their answers mean is not known here.

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

use super::{Cluster, Place, Report, sockets::Socket, sockets::Sockets};
use crate::{
    args::VerifyArgs,
    live::{chain, within},
    plan::Outcome,
};

/// What the agent's pods are called in `deploy/agent.yaml`.
const AGENT: &str = "wg-agent";
/// For a pod to be placed, to fetch its image and to begin.
const START: Duration = Duration::from_secs(90);
/// Between two looks at the pods.
const LOOK: Duration = Duration::from_millis(400);
/// For the deletion at the end.
const GONE: Duration = Duration::from_secs(30);
/// What one object may hold of targets, in bytes; etcd takes 1.5 MiB.
const ROOM: usize = 1 << 20;

/// One pod that is to try something.
pub(super) struct Job<'o> {
    pub(super) place: Place,
    /// By address and port: whose it is, and what.
    pub(super) sockets: BTreeMap<SocketAddr, (&'o str, Socket)>,
    /// The mesh's device on the node.
    pub(super) device: String,
    client: Client,
    name: String,
    namespace: String,
    body: Box<batch::Job>,
}

/// What one pod found.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) place: Place,
    /// Its addresses; of the node itself none.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) by_socket: BTreeMap<SocketAddr, Answer>,
}

/// What came back from one socket.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Answer {
    /// `open`, `refused`, `unreachable`, `silent` or an error.
    pub(super) answer: String,
    /// The interface its packets leave by.
    pub(super) way: Option<String>,
}

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

/// The Jobs that try these from one cluster. What cannot be tried there goes into the report.
pub(super) fn on<'o>(
    from: &Cluster<'o>,
    outcome: &Outcome,
    args: &VerifyArgs,
    targets: &[(&'o str, Sockets)],
    report: &mut Report,
) -> Result<Vec<Job<'o>>, String> {
    let name = from.name;
    let client = outcome.clients.get(from.identity).ok_or_else(|| {
        format!(
            "cluster {name:?}: nothing is tried from it: no credentials for it; name a context with --member-context"
        )
    })?;
    let sockets: BTreeMap<SocketAddr, (&str, Socket)> = targets
        .iter()
        .flat_map(|(to, sockets)| sockets.iter().map(move |(socket, what)| (*socket, (*to, what.clone()))))
        .collect();
    if sockets.is_empty() {
        return Ok(Vec::new());
    }
    let shipped = Shipped::of(from, args);
    let image = shipped.image.clone().ok_or_else(|| {
        format!("cluster {name:?}: nothing is tried from it: no pod of wg-agent runs there to take the image from; name one with --image")
    })?;
    let nodes: Vec<&String> = from
        .seen
        .member
        .nodes
        .iter()
        .filter(|(_, node)| node.ready && !node.deleting)
        .map(|(name, _)| name)
        .collect();
    if nodes.is_empty() {
        return Err(format!("cluster {name:?}: nothing is tried from it: no Node is Ready"));
    }
    let first = args.nodes.get();
    if nodes.len() > first {
        report.notes.push(format!(
            "{first} of {} Ready Nodes of {name:?} are tried from; --nodes says of how many",
            nodes.len()
        ));
    }
    let run = RandomState::new().hash_one(name);
    let mut jobs = Vec::new();
    for (number, node) in nodes.into_iter().take(first).enumerate() {
        let v6 = from.seen.member.nodes[node].internal_ips.iter().any(IpAddr::is_ipv6);
        let v4 = from.seen.member.nodes[node].internal_ips.iter().any(IpAddr::is_ipv4);
        let own_family = |socket: &SocketAddr| if socket.is_ipv4() { v4 } else { v6 };
        let sockets: BTreeMap<_, _> = sockets
            .iter()
            .filter(|(socket, _)| own_family(socket))
            .map(|(socket, what)| (*socket, what.clone()))
            .collect();
        let words = words(sockets.keys());
        if words.iter().map(String::len).sum::<usize>() > ROOM {
            let why = "are more than one pod can be told; narrow it with --to";
            return Err(format!("cluster {name:?}: {} sockets {why}", sockets.len()));
        }
        for host in [true, false] {
            let place = Place {
                cluster: name.to_owned(),
                node: node.clone(),
                host,
            };
            let called = format!(
                "clustermesh-verify-{run:016x}-{number}-{}",
                if host { "node" } else { "pod" }
            );
            jobs.push(Job {
                body: Box::new(body(&called, &place, &image, &shipped, &words)),
                place,
                sockets: sockets.clone(),
                device: shipped.device.clone(),
                client: client.clone(),
                name: called,
                namespace: shipped.namespace.clone(),
            });
        }
    }
    Ok(jobs)
}

/// `10.0.0.1=80,443` for each address.
fn words<'s>(sockets: impl Iterator<Item = &'s SocketAddr>) -> Vec<String> {
    let mut ports: BTreeMap<IpAddr, BTreeSet<u16>> = BTreeMap::new();
    for socket in sockets {
        ports.entry(socket.ip()).or_default().insert(socket.port());
    }
    let word = |(address, ports): (IpAddr, BTreeSet<u16>)| {
        let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
        format!("{address}={}", ports.join(","))
    };
    ports.into_iter().map(word).collect()
}

/// What the agent's own pods say of how it is installed.
struct Shipped {
    namespace: String,
    image: Option<String>,
    secrets: Vec<serde_json::Value>,
    device: String,
}

impl Shipped {
    fn of(from: &Cluster<'_>, args: &VerifyArgs) -> Self {
        let mut agents = from.seen.objects.pods.iter().filter_map(|(name, pod)| {
            let labels = pod.metadata.labels.as_ref()?;
            let spec = pod.spec.as_ref()?;
            let ours = labels.get("app.kubernetes.io/name").is_some_and(|name| name == AGENT);
            let container = spec.containers.first().filter(|_| ours)?;
            Some((name, spec, container))
        });
        let agent = agents.next();
        let flag = agent.as_ref().and_then(|(_, _, container)| {
            let mut words = container.args.iter().flatten();
            words.find_map(|word| word.strip_prefix("--interface=").map(str::to_owned))
        });
        let secrets = agent.as_ref().and_then(|(_, spec, _)| spec.image_pull_secrets.as_ref());
        Self {
            namespace: agent
                .as_ref()
                .map_or_else(|| "clustermesh-agent".to_owned(), |(name, ..)| name.namespace.clone()),
            image: args
                .image
                .clone()
                .or_else(|| agent.as_ref().and_then(|(_, _, container)| container.image.clone())),
            secrets: secrets
                .into_iter()
                .flatten()
                .map(|secret| json!({"name": secret.name}))
                .collect(),
            device: flag.unwrap_or_else(|| "kilo0".to_owned()),
        }
    }
}

fn body(name: &str, place: &Place, image: &str, shipped: &Shipped, words: &[String]) -> batch::Job {
    let labels = json!({
        "app.kubernetes.io/name": "clustermesh-verify",
        "app.kubernetes.io/part-of": "clustermesh",
    });
    let args: Vec<&str> = std::iter::once("probe")
        .chain(words.iter().map(String::as_str))
        .collect();
    let job = json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": shipped.namespace, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            // Where this program is killed, the cluster ends the pod and takes everything away by itself.
            "activeDeadlineSeconds": (START + patience(words)).as_secs(),
            "ttlSecondsAfterFinished": 300,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "nodeName": place.node,
                    "hostNetwork": place.host,
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": false,
                    "enableServiceLinks": false,
                    "terminationGracePeriodSeconds": 0,
                    "tolerations": [{"operator": "Exists"}],
                    "imagePullSecrets": shipped.secrets,
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
    serde_json::from_value(job).expect("the words above are a Job")
}

/// For everything to be tried, 400 at once and each 2.5 s at most; twice that.
fn patience(words: &[String]) -> Duration {
    let sockets: usize = words.iter().map(|word| word.split(',').count()).sum();
    Duration::from_secs(30) + Duration::from_millis((sockets / 400) as u64 * 5000)
}

/// Runs them all at once, and takes them away whatever happens. The outcomes are in the order of the Jobs.
pub(super) async fn run(jobs: &[Job<'_>], stderr: &mut dyn Write) -> Vec<Result<Answers, String>> {
    let outcomes = tokio::select! {
        outcomes = futures::future::join_all(jobs.iter().map(one)) => outcomes,
        () = interrupted() => {
            let _ = writeln!(stderr, "note: interrupted: the pods are being taken away");
            jobs.iter().map(|_| Err("interrupted".to_owned())).collect()
        }
    };
    for left in futures::future::join_all(jobs.iter().map(away))
        .await
        .into_iter()
        .flatten()
    {
        let _ = writeln!(stderr, "warning: {left}");
    }
    outcomes
}

/// Ctrl-C, or the end asked for by another program.
async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut term) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = term.recv() => {}
    }
}

async fn one(job: &Job<'_>) -> Result<Answers, String> {
    let jobs: Api<batch::Job> = Api::namespaced(job.client.clone(), &job.namespace);
    let pods: Api<Pod> = Api::namespaced(job.client.clone(), &job.namespace);
    let made = within(jobs.create(&PostParams::default(), &job.body)).await;
    made.map_err(|why| {
        format!(
            "the Job that tries it cannot be made in namespace {}: {why}",
            job.namespace
        )
    })?;
    let until = Instant::now() + START + patience(&words(job.sockets.keys()));
    let mine = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={}", job.name));
    let mut last = "it has no pod yet".to_owned();
    let pod = loop {
        if Instant::now() > until {
            return Err(format!("the pod that tries it did not end in time: {last}"));
        }
        // A list that fails once is asked for again.
        match within(pods.list(&mine)).await.map(|list| list.items.into_iter().next()) {
            Ok(Some(pod)) => match pod.status.as_ref().and_then(|status| status.phase.as_deref()) {
                Some("Succeeded") => break pod,
                Some("Failed") => return Err(failed(&pods, &pod).await),
                _ => last = waiting(&pod),
            },
            Ok(None) => {}
            Err(why) => last = why,
        }
        tokio::time::sleep(LOOK).await;
    };
    let name = pod.metadata.name.clone().unwrap_or_default();
    let text = within(pods.logs(&name, &LogParams::default())).await;
    let text = text.map_err(|why| format!("the log of pod {}/{name} cannot be read: {why}", job.namespace))?;
    let addresses = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
    let addresses = addresses
        .filter_map(|ip| ip.ip.parse().ok())
        .filter(|_| !job.place.host);
    Ok(Answers {
        place: job.place.clone(),
        addresses: addresses.collect(),
        by_socket: read(&text)?,
    })
}

/// What a pod printed, whole.
fn read(text: &str) -> Result<BTreeMap<SocketAddr, Answer>, String> {
    let mut answers = BTreeMap::new();
    let mut whole = None;
    for line in text.lines() {
        match serde_json::from_str(line) {
            Ok(Line::Answer { socket, answer }) => drop(answers.insert(socket, answer)),
            Ok(Line::Done { tried }) => whole = Some(tried),
            Err(_) => {
                return Err(format!(
                    "the pod printed what is no answer: {line:?}; is its image as new as this program?"
                ));
            }
        }
    }
    match whole {
        Some(tried) if tried == answers.len() => Ok(answers),
        _ => Err(format!("the pod's log is not whole: it has {} answers", answers.len())),
    }
}

/// Why it has not begun.
fn waiting(pod: &Pod) -> String {
    let status = pod.status.as_ref();
    let containers = status
        .into_iter()
        .flat_map(|status| status.container_statuses.iter().flatten());
    let reasons = containers.filter_map(|container| container.state.as_ref()?.waiting.as_ref());
    let words = |reason: &k8s_openapi::api::core::v1::ContainerStateWaiting| {
        let part = |text: &Option<String>| text.clone().unwrap_or_default();
        format!("{} {}", part(&reason.reason), part(&reason.message))
    };
    reasons
        .map(words)
        .next()
        .unwrap_or_else(|| "it is starting, or at it".to_owned())
}

async fn failed(pods: &Api<Pod>, pod: &Pod) -> String {
    let name = pod.metadata.name.clone().unwrap_or_default();
    let status = pod.status.as_ref();
    let said = status.and_then(|status| status.message.clone().or_else(|| status.reason.clone()));
    let lines = LogParams {
        tail_lines: Some(3),
        ..LogParams::default()
    };
    let log = within(pods.logs(&name, &lines)).await.unwrap_or_default();
    format!(
        "the pod that tries it failed: {} {}; an image that is older than this program knows no `wg-agent probe`",
        said.unwrap_or_default(),
        log.trim()
    )
}

/// Deletes a Job and waits until it and its pod are gone; what is left, in words.
async fn away(job: &Job<'_>) -> Option<String> {
    let jobs: Api<batch::Job> = Api::namespaced(job.client.clone(), &job.namespace);
    let delete = DeleteParams {
        propagation_policy: Some(PropagationPolicy::Foreground),
        ..DeleteParams::default()
    };
    let gone = async {
        match jobs.delete(&job.name, &delete).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            Err(error) => return Err(chain(&error)),
            Ok(_) => {}
        }
        loop {
            match jobs.get_opt(&job.name).await {
                Ok(None) => return Ok(()),
                Ok(Some(_)) => tokio::time::sleep(LOOK).await,
                Err(error) => return Err(chain(&error)),
            }
        }
    };
    let why = match tokio::time::timeout(GONE, gone).await {
        Ok(Ok(())) => return None,
        Ok(Err(why)) => why,
        Err(_) => format!("it is still there after {} s", GONE.as_secs()),
    };
    Some(format!(
        "Job {}/{} of cluster {:?} could not be taken away ({why}): the cluster removes it within 10 minutes, or delete it",
        job.namespace, job.name, job.place.cluster
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pod_printed_counts_only_whole() {
        let line = r#"{"socket":"10.0.0.1:80","answer":"open","way":"kilo0"}"#;
        let answer = Answer {
            answer: "open".to_owned(),
            way: Some("kilo0".to_owned()),
        };
        let whole = read(&format!("{line}\n{{\"tried\":1}}\n"));
        assert_eq!(whole, Ok([("10.0.0.1:80".parse().unwrap(), answer)].into()));
        for part in [line.to_owned(), format!("{line}\n{{\"tried\":2}}")] {
            assert_eq!(
                read(&part),
                Err("the pod's log is not whole: it has 1 answers".to_owned())
            );
        }
        assert!(read("error: unrecognized subcommand 'probe'").is_err());
    }

    #[test]
    fn an_address_is_named_once_with_all_its_ports() {
        let sockets = ["10.0.0.1:443", "10.0.0.1:80", "[fd00::1]:22"].map(|text| text.parse().unwrap());
        assert_eq!(words(sockets.iter()), ["10.0.0.1=80,443", "fd00::1=22"]);
    }
}
