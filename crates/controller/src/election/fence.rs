//! The Lease in a member that the leader takes before its first write there.
//!
//! While the leader holds the hub's Lease, it does not renew this one, so each new leader costs a member one write. If the leader
//! cannot renew the hub's Lease, because the hub does not answer or only this replica is cut off, it goes on writing into a member as long
//! as it can renew the Lease there. Only a replica that holds the hub's Lease may take the Lease of a member from another. So if there is a
//! new leader that reaches the member, the old one cannot renew; if there is none, or it does not reach the member, the old one goes on.

use std::{
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use clustermesh_api::names::{LABEL_HUB, lease_name};
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    jiff::Timestamp,
};
use kube::{Api, Client, Error, ResourceExt};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{
    Election, NotPermitted, Permission, Term,
    lease::{DURATION, holder, with_holder, within, write},
};
use crate::api_error;

/// The namespace of the Lease, in which `deploy/member-account.yaml` gives the controller the right to write it.
const NAMESPACE: &str = "clustermesh";
/// After a renewal was sent, writes into the member are permitted for this long.
const VALIDITY: Duration = Duration::from_secs(2);
/// How long a new leader waits after it has taken the Lease from a replica that has renewed it. It is longer than [`VALIDITY`], so that
/// the last requests of that replica have ended.
const WAIT: Duration = Duration::from_millis(2_500);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failed attempt to take the Lease.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// An API server that has just started denies everything until it has loaded its RBAC roles. If requests of an
/// earlier leader may still be in flight, a new leader retries a denied Lease for this long before it writes without the Lease.
const DENIED_AFTER: Duration = Duration::from_secs(60);
/// When the member does not permit the Lease, it is tried again after this time.
const REFUSED_FOR: Duration = Duration::from_secs(300);
/// When another replica holds the Lease, or it was deleted, it is read again after this time.
const TAKEN_FOR: Duration = Duration::from_secs(5);

/// The Lease for one connection to a member. Two connections to the same cluster, by different Secrets, share one Lease.
pub(crate) struct Fence {
    election: Arc<Election>,
    /// For logs.
    member: String,
    leases: Api<Lease>,
    name: String,
    hub: String,
    progress: std::sync::Mutex<Progress>,
    held: Mutex<Held>,
    /// Cancelled when the connection has ended.
    end: CancellationToken,
}

/// The progress of this replica in taking the Lease.
#[derive(Default)]
struct Progress {
    /// The number of the term in which this replica may write into the member: it has taken the Lease, or the member does not
    /// permit the Lease.
    ready: Option<u64>,
    /// When to try the Lease again, if the member does not permit it.
    refused_until: Option<Instant>,
    /// Whether a task is taking the Lease.
    is_taking: bool,
    /// Why the Lease could not be taken yet.
    problem: Option<String>,
}

/// What this replica knows of the Lease.
#[derive(Default)]
struct Held {
    /// The Lease as this replica last read or wrote it. `None` = it was not read yet, or the last renewal failed, for example
    /// because another connection or replica has changed the Lease.
    lease: Option<Lease>,
    /// When the last successful renewal was sent.
    renewed: Option<Instant>,
    /// When to read the Lease again, if another replica holds it or it was deleted.
    taken_until: Option<Instant>,
}

/// When dropped, records that no task is taking the Lease any more, whether it was taken or not.
struct Taking<'a>(&'a Fence);

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.0.progress().is_taking = false;
    }
}

impl Fence {
    /// `end` is cancelled when the connection has ended.
    pub(crate) fn new(
        election: Arc<Election>,
        member: String,
        hub: &str,
        client: Client,
        end: CancellationToken,
    ) -> Self {
        Self {
            election,
            member,
            leases: Api::namespaced(client, NAMESPACE),
            name: lease_name(hub),
            hub: hub.to_owned(),
            progress: std::sync::Mutex::default(),
            held: Mutex::default(),
            end,
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this replica is the leader and has not taken the Lease yet. Then it may not write into the member.
    pub(crate) fn is_awaited(&self) -> bool {
        let term = self.election.held_term();
        term.is_ok_and(|term| self.progress().ready != Some(term.number))
    }

    /// Why the Lease could not be taken yet; `None` = no problem is known, or [`Self::is_awaited`] is false.
    pub(crate) fn problem(&self) -> Option<String> {
        // This line also releases the lock, because `is_awaited` takes it, too.
        let problem = self.progress().problem.clone()?;
        if !self.is_awaited() {
            return None;
        }
        Some(format!(
            "the Lease {NAMESPACE}/{} there cannot be written: {problem}",
            self.name
        ))
    }

    /// Whether the caller must call [`Self::take`]: this leader has not taken the Lease, or must retry it after the member
    /// refused it, and no other task is taking it. If so, records that a task is taking it.
    pub(crate) fn start_taking(&self) -> bool {
        let Ok(term) = self.election.held_term() else {
            return false;
        };
        let mut progress = self.progress();
        let is_due = progress.refused_until.is_some_and(|until| Instant::now() > until);
        let must_start = !progress.is_taking && (progress.ready != Some(term.number) || is_due);
        progress.is_taking |= must_start;
        must_start
    }

    /// Takes the Lease, and waits until the member may be written. Tries until it succeeds, or the term or the connection ends.
    pub(crate) async fn take(&self) {
        let _taking = Taking(self);
        let take = async {
            while let Ok(term) = self.election.held_term() {
                let Err(why) = self.try_take(&term).await else { return };
                let last = self.progress().problem.replace(why.clone());
                if last.as_ref() != Some(&why) {
                    tracing::warn!(
                        member = self.member,
                        why,
                        "the Lease in the member cannot be written; will retry"
                    );
                }
                sleep(RETRY_INTERVAL).await;
            }
        };
        tokio::select! {
            () = take => {}
            () = self.end.cancelled() => {}
        }
    }

    async fn try_take(&self, term: &Term) -> Result<(), String> {
        let identity = &self.election.process;
        let current = match within(REQUEST_TIMEOUT, self.leases.get_opt(&self.name)).await {
            Ok(current) => current,
            Err(error) => return self.write_without(term, &error),
        };
        let previous = current.as_ref().and_then(holder).cloned();
        let now = Instant::now();
        let (lease, valid_from) = match current {
            // Taken in an earlier term, by an earlier connection, or by one with another Secret.
            Some(lease) if previous.as_ref() == Some(identity) => {
                let rest = WAIT.saturating_sub(time_since_taken(&lease));
                (lease, now + rest)
            }
            current => {
                let mut lease = with_holder(current.as_ref(), &self.name, identity, DURATION);
                lease.labels_mut().insert(LABEL_HUB.to_owned(), self.hub.clone());
                // It does not expire: a new leader takes it, however old it is.
                lease.spec.get_or_insert_default().lease_duration_seconds = None;
                // If this process was suspended after it had read the Lease, another replica may be the leader now.
                if self.election.held_term().map(|held| held.number) != Ok(term.number) {
                    return Err("this replica is not the leader any more".to_owned());
                }
                let lease = match write(&self.leases, &lease, REQUEST_TIMEOUT).await {
                    Ok(lease) => lease,
                    Err(error) => return self.write_without(term, &error),
                };
                // This replica holds the hub's Lease, so the previous holder writes only if it has renewed the member's Lease.
                // A holder that has released the hub's Lease has ended its writes.
                let previous_may_write =
                    current.as_ref().is_some_and(was_renewed) && previous.is_some() && previous != term.released_by;
                (lease, if previous_may_write { Instant::now() + WAIT } else { now })
            }
        };
        sleep_until(valid_from).await;
        *self.held.lock().await = Held {
            lease: Some(lease),
            ..Held::default()
        };
        self.set_ready(term, None);
        Ok(())
    }

    fn set_ready(&self, term: &Term, refused_until: Option<Instant>) {
        let mut progress = self.progress();
        progress.ready = Some(term.number);
        progress.refused_until = refused_until;
        progress.problem = None;
    }

    /// Permits writes without the Lease, if the member does not permit the Lease.
    fn write_without(&self, term: &Term, error: &Error) -> Result<(), String> {
        let code = match error {
            Error::Api(status) => status.code,
            _ => return Err(api_error::describe(error)),
        };
        let may_be_starting = code == 403 && !term.is_clean && term.began.elapsed() < DENIED_AFTER;
        // 401: the kubeconfig has to be renewed. 409: another connection of this process was faster. 408, 429: the API server
        // asks for a later attempt.
        if may_be_starting || !(400..500).contains(&code) || matches!(code, 401 | 408 | 409 | 429) {
            return Err(api_error::describe(error));
        }
        tracing::warn!(
            member = self.member,
            code,
            "the member does not permit the Lease {NAMESPACE}/{}, so nothing is written there while the hub does not answer; apply \
             deploy/member-account.yaml in it",
            self.name,
        );
        self.set_ready(term, Some(Instant::now() + REFUSED_FOR));
        Ok(())
    }

    /// Returns the permission to write into the member. Renews the Lease if this replica cannot renew the one in the hub.
    ///
    /// # Errors
    /// This replica may not write into the member now.
    pub(super) async fn permission(&self) -> Result<Permission, NotPermitted> {
        match self.election.held_term() {
            Ok(term) if self.progress().ready == Some(term.number) => Ok(term.permission()),
            Ok(_) => Err(NotPermitted::NotTaken),
            Err(NotPermitted::Lapsed) => self.renew().await,
            Err(why) => Err(why),
        }
    }

    /// Renews the Lease, unless it was renewed a short time ago.
    async fn renew(&self) -> Result<Permission, NotPermitted> {
        let mut held = self.held.lock().await;
        if held.taken_until.is_some_and(|until| Instant::now() < until) {
            return Err(NotPermitted::Taken);
        }
        if held.renewed.is_none_or(|sent| sent.elapsed() > VALIDITY / 2) {
            self.renew_now(&mut held).await?;
        }
        let until = held
            .renewed
            .map(|sent| sent + VALIDITY)
            .filter(|until| *until > Instant::now());
        let (Some(until), Some(term)) = (until, self.election.term_number()) else {
            return Err(NotPermitted::Lapsed);
        };
        Ok(Permission { term, until })
    }

    async fn renew_now(&self, held: &mut Held) -> Result<(), NotPermitted> {
        let identity = &self.election.process;
        let member_error = |error: &Error| NotPermitted::Member(api_error::describe(error));
        // A second attempt if another connection of this process has renewed the Lease meanwhile.
        for _ in 0..2 {
            let current = match held.lease.take() {
                Some(lease) => lease,
                None => {
                    let current = within(REQUEST_TIMEOUT, self.leases.get_opt(&self.name)).await;
                    match current.map_err(|error| member_error(&error))? {
                        Some(lease) if holder(&lease) == Some(identity) => {
                            // The replica that held it before may still have a request in flight.
                            if time_since_taken(&lease) < WAIT {
                                return Err(NotPermitted::NotTaken);
                            }
                            lease
                        }
                        _ => {
                            held.taken_until = Some(Instant::now() + TAKEN_FOR);
                            return Err(NotPermitted::Taken);
                        }
                    }
                }
            };
            let sent = Instant::now();
            let lease = with_holder(Some(&current), &self.name, identity, DURATION);
            match write(&self.leases, &lease, REQUEST_TIMEOUT).await {
                Ok(lease) => {
                    (held.lease, held.renewed) = (Some(lease), Some(sent));
                    return Ok(());
                }
                Err(Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                Err(error) => return Err(member_error(&error)),
            }
        }
        Err(NotPermitted::Taken)
    }
}

/// Whether the holder has renewed the Lease since it took it: then it may have written while it could not renew the hub's Lease.
fn was_renewed(lease: &Lease) -> bool {
    let Some(LeaseSpec {
        acquire_time,
        renew_time,
        ..
    }) = &lease.spec
    else {
        return true;
    };
    acquire_time != renew_time
}

/// How long ago this process took the Lease, by the wall clock. Zero if the clock was set back.
fn time_since_taken(lease: &Lease) -> Duration {
    let taken = lease.spec.as_ref().and_then(|spec| spec.acquire_time.as_ref());
    let since = taken.map(|taken| Timestamp::now().duration_since(taken.0));
    since
        .and_then(|since| Duration::try_from(since).ok())
        .unwrap_or_default()
}
