//! Elects one replica of the controller as the leader. Only the leader writes.
//!
//! The leader holds a Lease in the hub, renews it every second, and may write for three seconds after it has sent the last successful
//! renewal. Another replica takes the Lease when it has not changed for four seconds, or at once when the leader has released it. While the
//! hub answers slowly, both times are five times as long: the leader writes the duration into the Lease, and the others respect it. Each
//! replica measures these times with its own monotonic clock. The times of day in the Lease are for people.
//!
//! While the hub does not answer, this Lease cannot be renewed, but changes of one member must still reach the others. Then the last leader
//! writes into a member only while it renews a Lease in that member ([`fence`]). All requests that write pass [`guard`], which checks both
//! Leases.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use clustermesh_api::names::{LATE_WRITES, RELEASED_BY};
use clustermesh_daemon::{Readiness, ReadinessItem};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client, Config, Error, ResourceExt};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::api_error;

pub(crate) mod fence;
pub(crate) mod guard;
mod latency;
mod lease;

use latency::{Latency, validity};
use lease::{DURATION, duration, holder, released_by, with_holder, within, write};

/// The name of the Lease in the controller's namespace.
pub(crate) const LEASE: &str = "clustermesh-controller";
/// The time from one renewal to the next.
const RENEW_INTERVAL: Duration = Duration::from_secs(1);
/// The pause after a failed renewal, while the Lease is still valid.
const RETRY_INTERVAL: Duration = Duration::from_millis(300);
/// How often a standby reads the Lease.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The pause after a failed request, while the Lease is not held.
const FAILED_INTERVAL: Duration = Duration::from_secs(1);
/// A slow hub responds within this time. A response that is too late to extend the term still has the resourceVersion that the
/// next renewal needs.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(6);
/// How long a leader that exits waits for its last requests.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// For this long, an API server may still execute a request that its client has given up (`--request-timeout` of kube-apiserver).
const LATE_WRITES_FOR: Duration = Duration::from_secs(60);

/// Whether this replica may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leadership {
    /// Another replica is the leader, or none is.
    Standby,
    /// This replica holds the hub's Lease.
    Leader,
    /// This replica was the leader, could not renew the Lease, and has not seen another leader since. It may write only into members
    /// whose Lease it renews.
    Lapsed,
}

/// Why a request that writes was not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotPermitted {
    #[error("this replica of the controller is not the leader")]
    Standby,
    #[error("this replica of the controller could not renew the leader's Lease in the hub")]
    Lapsed,
    #[error("this replica of the controller has not taken the Lease in this member yet")]
    NotTaken,
    #[error("another replica of the controller has taken the Lease in this member")]
    Taken,
    /// The request for the member's Lease failed.
    #[error("{0}")]
    Member(String),
}

/// The permission to have a request in flight.
#[derive(Debug, Clone, Copy)]
struct Permission {
    /// The number of the term.
    term: u64,
    until: Instant,
}

/// The time from the acquisition of the Lease until this replica sees another holder, or exits.
#[derive(Debug, Clone)]
struct Term {
    /// Counts the terms of this process.
    number: u64,
    began: Instant,
    /// Until when this replica may write without the Lease of a member.
    valid_until: Instant,
    /// The process of the replica that had released the Lease before. It has ended its writes.
    released_by: Option<String>,
    /// Whether no request of an earlier leader can be in flight. Otherwise, an API server may still create an object for
    /// that leader.
    is_clean: bool,
}

impl Term {
    /// The permission for a request that is sent now. It is never longer than the shortest Lease permits, because a later renewal may shorten
    /// the Lease. [`guard`] extends the permission while the request is in flight.
    fn permission(&self) -> Permission {
        Permission {
            term: self.number,
            until: self.valid_until.min(Instant::now() + validity(DURATION)),
        }
    }
}

#[derive(Debug, Default)]
struct State {
    term: Option<Term>,
    /// How many terms this process has had.
    terms: u64,
    /// Whether the process exits.
    is_resigning: bool,
    /// Whether the hub answered the last request for the Lease, even if only with an error.
    hub_answers: bool,
    /// When a request in flight was given up because the permission ended.
    gave_up: Option<Instant>,
}

/// The Lease, as this replica has read or written it.
#[derive(Debug)]
struct Seen {
    /// `None` = it does not exist.
    lease: Option<Lease>,
    /// Since when the hub has answered with this version of the Lease.
    since: Instant,
}

/// The election. All parts of the process share it.
pub(crate) struct Election {
    /// The name of the replica and [`Self::process`]: the holder in the Lease of the hub.
    identity: String,
    /// A random id of this process: the holder in the Leases of members, whose administrators need not know the names of the
    /// hub's pods.
    process: String,
    leases: Api<Lease>,
    latency: Latency,
    state: Mutex<State>,
    /// The leadership, and whether the hub answers.
    standing: watch::Sender<(Leadership, bool)>,
    /// The requests in flight that write into the hub or a member.
    writes: TaskTracker,
    /// Cancelled to end the election, because the process exits.
    resigning: CancellationToken,
    /// Cancelled when the election has ended.
    ended: CancellationToken,
}

impl Election {
    /// Starts the election with the Lease in `namespace` of the hub. `replica` is the name of the pod or host. `readiness` has a
    /// pending item until the hub has answered for the first time; later a remark names a problem with the Lease.
    ///
    /// The election has a thread and connections of its own. Otherwise a long pass, or a slow request to the hub, would delay a renewal.
    ///
    /// # Errors
    /// The configuration cannot be used, or the system refuses a thread.
    pub(crate) fn start(
        config: &Config,
        namespace: &str,
        replica: &str,
        readiness: Readiness,
    ) -> anyhow::Result<Arc<Self>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // Retries would delay the next renewal, which has newer data.
        let mut config = config.clone();
        config.default_retry = false;
        let client = {
            let _context = runtime.enter();
            clustermesh_daemon::client::build(&config)?
        };
        let election = Arc::new(Self::new(client, namespace, replica));
        let (running, ended) = (Arc::clone(&election), election.ended.clone().drop_guard());
        let thread = std::thread::Builder::new().name("election".to_owned());
        thread.spawn(move || {
            let _ended = ended;
            runtime.block_on(running.run(readiness));
        })?;
        Ok(election)
    }

    fn new(client: Client, namespace: &str, replica: &str) -> Self {
        // A restarted container has the name of its predecessor, which may still have a request in flight.
        let process = format!("{:016x}", RandomState::new().hash_one(std::process::id()));
        let identity = format!("{replica}_{process}");
        tracing::info!(identity, "this replica takes part in the election of the leader");
        Self {
            identity,
            process,
            leases: Api::namespaced(client, namespace),
            latency: Latency::default(),
            state: Mutex::default(),
            standing: watch::Sender::new((Leadership::Standby, false)),
            writes: TaskTracker::new(),
            resigning: CancellationToken::new(),
            ended: CancellationToken::new(),
        }
    }

    /// An election that this replica has won, for ten years.
    #[cfg(test)]
    pub(crate) fn of_leader(client: Client) -> Arc<Self> {
        let election = Self::new(client, "ns", "test");
        election.extend_term(Instant::now() + Duration::from_secs(315_360_000), None, true);
        Arc::new(election)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports when [`Self::leadership`] or [`Self::hub_answers`] has changed.
    pub(crate) fn subscribe(&self) -> watch::Receiver<(Leadership, bool)> {
        self.standing.subscribe()
    }

    pub(crate) fn leadership(&self) -> Leadership {
        match self.held_term() {
            Ok(_) => Leadership::Leader,
            Err(NotPermitted::Standby) => Leadership::Standby,
            Err(_) => Leadership::Lapsed,
        }
    }

    /// Returns the term if this replica holds the Lease now.
    fn held_term(&self) -> Result<Term, NotPermitted> {
        match &*self.state() {
            State { is_resigning: true, .. } | State { term: None, .. } => Err(NotPermitted::Standby),
            State { term: Some(term), .. } if Instant::now() < term.valid_until => Ok(term.clone()),
            State { .. } => Err(NotPermitted::Lapsed),
        }
    }

    /// The number of the current term, also if the Lease is not held now.
    pub(crate) fn term_number(&self) -> Option<u64> {
        self.state().term.as_ref().map(|term| term.number)
    }

    /// Whether the hub answers requests for the Lease, even if only with an error.
    pub(crate) fn hub_answers(&self) -> bool {
        self.state().hub_answers
    }

    /// Whether the requests of earlier leaders, and those that this replica gave up, can create no object any more. Then a cluster
    /// in which a mesh has no object stays without objects of this mesh.
    pub(crate) fn has_ended_earlier_writes(&self) -> bool {
        let state = self.state();
        let is_over = |since: Instant| since.elapsed() > LATE_WRITES_FOR;
        let term = state.term.as_ref();
        term.is_some_and(|term| term.is_clean || is_over(term.began)) && state.gave_up.is_none_or(is_over)
    }

    /// Whether the election has ended. It ends by itself only after a panic.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    async fn run(&self, readiness: Readiness) {
        let mut unread = Some(readiness.pending("Lease of the leader"));
        let mut seen = None;
        // The last problem that was logged, and its remark in `readiness`.
        let mut last_problem: Option<(String, ReadinessItem)> = None;
        let mut last_holder = None;
        loop {
            let step = self.step(&mut seen, &mut last_holder).await;
            let hub_answers = !matches!(&step, Err(error) if !matches!(error, Error::Api(_)));
            self.state().hub_answers = hub_answers;
            let leadership = self.leadership();
            let last = *self.standing.borrow();
            self.standing.send_if_modified(|standing| {
                let next = (leadership, hub_answers);
                std::mem::replace(standing, next) != next
            });
            if last.0 != leadership && leadership == Leadership::Lapsed {
                tracing::warn!(
                    "the leader's Lease has lapsed: members are written only while their own Leases can be renewed"
                );
            }
            let (pause, problem) = match step {
                Ok(pause) => {
                    unread.take();
                    (pause, None)
                }
                Err(error) if leadership == Leadership::Leader => (RETRY_INTERVAL, Some(describe(&error))),
                Err(error) => (FAILED_INTERVAL, Some(describe(&error))),
            };
            if problem.as_ref() != last_problem.as_ref().map(|(why, _)| why) {
                match &problem {
                    Some(why) => tracing::warn!(
                        lease = LEASE,
                        why,
                        ?leadership,
                        "the leader's Lease cannot be read or renewed"
                    ),
                    None => tracing::info!(
                        lease = LEASE,
                        ?leadership,
                        "the leader's Lease can be read and renewed again"
                    ),
                }
                last_problem = problem.map(|why| {
                    let remark = readiness.remark(format!("lease: {why}"));
                    (why, remark)
                });
            }
            tokio::select! {
                () = sleep(pause) => {}
                () = self.resigning.cancelled() => return self.release().await,
            }
        }
    }

    /// Reads, takes or renews the Lease. Returns the pause before the next step. `last_holder` is the last holder that this process knows.
    async fn step(&self, seen: &mut Option<Seen>, last_holder: &mut Option<String>) -> Result<Duration, Error> {
        let has_term = self.state().term.is_some();
        if !has_term || seen.is_none() {
            let current = self.read(seen).await?;
            let holder = current.lease.as_ref().and_then(holder).cloned();
            if has_term && holder.as_ref() != Some(&self.identity) {
                tracing::warn!(holder, "this replica has lost the leader's Lease; it is a standby now");
                self.state().term = None;
                return Ok(Duration::ZERO);
            }
            let wait = if holder.as_ref() == Some(&self.identity) {
                Duration::ZERO
            } else {
                time_until_free(current, last_holder.as_ref())
            };
            *last_holder = holder.or_else(|| last_holder.take());
            if !wait.is_zero() {
                return Ok(wait.min(POLL_INTERVAL));
            }
        }
        let current = seen.as_ref().and_then(|seen| seen.lease.as_ref());
        let is_new = current.is_none();
        let released_by = current.and_then(released_by).cloned();
        let has_late_writes = current.is_some_and(|lease| lease.annotations().contains_key(LATE_WRITES));
        let sent = Instant::now();
        let duration = self.latency.lease_duration();
        let lease = with_holder(current, LEASE, &self.identity, duration);
        let valid_until = sent + validity(duration);
        self.limit_term(valid_until);
        let written = self.latency.measure(write(&self.leases, &lease, REQUEST_TIMEOUT));
        match written.await {
            Ok(lease) => {
                *seen = Some(Seen {
                    lease: Some(lease),
                    since: sent,
                });
                let is_clean = (released_by.is_some() && !has_late_writes) || (is_new && last_holder.is_none());
                *last_holder = Some(self.identity.clone());
                let released_by = released_by.as_deref().and_then(|by| by.rsplit_once('_'));
                let released_by = released_by.map(|(_, process)| process.to_owned());
                self.extend_term(valid_until, released_by, is_clean);
                Ok(RENEW_INTERVAL.saturating_sub(sent.elapsed()))
            }
            // Another process has written or deleted the Lease, or the response to our last write was lost.
            Err(Error::Api(status)) if status.code == 409 || (status.code == 404 && !is_new) => {
                *seen = None;
                Ok(Duration::ZERO)
            }
            Err(error) => Err(error),
        }
    }

    /// Reads the Lease into `seen`.
    async fn read<'a>(&self, seen: &'a mut Option<Seen>) -> Result<&'a Seen, Error> {
        // If the request fails, `seen` stays empty, so the wait for the expiry of the Lease starts anew with the next answer. An
        // unchanged Lease does not prove that the leader is gone: perhaps the leader's requests failed meanwhile, too.
        let last = seen.take();
        let read = within(REQUEST_TIMEOUT, self.leases.get_opt(LEASE));
        let lease = self.latency.measure(read).await?;
        let version = |lease: &Option<Lease>| lease.as_ref().and_then(ResourceExt::resource_version);
        let same = last.filter(|last| version(&last.lease) == version(&lease));
        let since = same.map_or_else(Instant::now, |same| same.since);
        Ok(seen.insert(Seen { lease, since }))
    }

    /// Ends the current term not later than this time. Called before each renewal, because a renewal can shorten the Lease
    /// although its response is lost.
    fn limit_term(&self, valid_until: Instant) {
        if let Some(term) = &mut self.state().term {
            term.valid_until = term.valid_until.min(valid_until);
        }
    }

    /// Extends the current term until this time, or starts one.
    fn extend_term(&self, valid_until: Instant, released_by: Option<String>, is_clean: bool) {
        let mut state = self.state();
        if let Some(term) = &mut state.term {
            term.valid_until = valid_until;
            return;
        }
        tracing::info!(identity = self.identity, "this replica is the leader now");
        state.terms += 1;
        state.term = Some(Term {
            number: state.terms,
            began: Instant::now(),
            valid_until,
            released_by,
            is_clean,
        });
    }

    /// Records that a request in flight was given up. Its API server may still execute it.
    fn record_given_up(&self) {
        self.state().gave_up = Some(Instant::now());
    }

    /// Refuses all further writes, waits a short time for those in flight, and releases the Lease if this replica holds it. Ends the
    /// election.
    pub(crate) async fn resign(&self) {
        self.resigning.cancel();
        self.ended.cancelled().await;
    }

    async fn release(&self) {
        let term = self.held_term();
        let was_clean = self.has_ended_earlier_writes();
        self.state().is_resigning = true;
        if term.is_err() {
            return;
        }
        self.writes.close();
        let has_ended = tokio::time::timeout(DRAIN_TIMEOUT, self.writes.wait()).await.is_ok();
        let released = async {
            let mut lease = within(REQUEST_TIMEOUT, self.leases.get(LEASE)).await?;
            if holder(&lease) != Some(&self.identity) {
                return Ok(());
            }
            lease.spec.get_or_insert_default().holder_identity = None;
            let annotations = lease.annotations_mut();
            annotations.remove(RELEASED_BY);
            annotations.remove(LATE_WRITES);
            // Without this annotation, the next leader waits until the Lease would have expired.
            if has_ended {
                annotations.insert(RELEASED_BY.to_owned(), self.identity.clone());
            }
            if !was_clean {
                annotations.insert(LATE_WRITES.to_owned(), "true".to_owned());
            }
            write(&self.leases, &lease, REQUEST_TIMEOUT).await.map(drop)
        };
        match released.await {
            Ok(()) => tracing::info!(lease = LEASE, has_ended, "the leader's Lease is released"),
            Err(error) => {
                tracing::warn!(
                    lease = LEASE,
                    why = describe(&error),
                    "the leader's Lease is not released; it expires"
                );
            }
        }
    }
}

/// How long this replica must wait before it may take the Lease from its holder.
fn time_until_free(current: &Seen, last_holder: Option<&String>) -> Duration {
    let lease = current.lease.as_ref();
    let is_free = match lease {
        // A Lease that was deleted by hand may still have a leader.
        None => last_holder.is_none(),
        // If another replica released the Lease, the last known holder may still write.
        Some(lease) => released_by(lease).is_some_and(|by| last_holder.is_none_or(|last| last == by)),
    };
    if is_free {
        return Duration::ZERO;
    }
    duration(lease).saturating_sub(current.since.elapsed())
}

/// Describes why the Lease in the hub was not read or written, with the remedy.
fn describe(error: &Error) -> String {
    match error {
        Error::Api(status) if status.code == 403 => format!(
            "the controller may not get, create and update Leases in its namespace: apply deploy/controller.yaml ({})",
            api_error::sanitize(&status.message)
        ),
        Error::Api(status) if status.code == 404 => {
            "the namespace of the Lease does not exist: set POD_NAMESPACE, or the namespace of the kubeconfig's context"
                .to_owned()
        }
        Error::Api(status) => format!("the hub refuses ({})", status.code),
        _ => "the hub does not answer".to_owned(),
    }
}

#[cfg(test)]
mod tests;
