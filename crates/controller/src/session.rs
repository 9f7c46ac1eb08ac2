//! Runs one session per member. A session watches the credentials of the member, connects, and keeps the feeds up to date (each feed:
//! a local table of the member's objects of one kind). A probe detects an API server that does not answer. Sessions are independent:
//! no member delays another.

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use clustermesh_access::{expiry::Expiry, memory::Account};
use clustermesh_core::{
    mesh::{ClusterIdentity, ObjectName},
    observe::{Member, Observation},
};
use kube::Client;
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    api_error,
    election::{
        fence::Fence,
        guard::{Permit, guard},
    },
    feed::{self, Changed, Trust},
    hub::Hub,
    session::member_feeds::MemberFeeds,
};

mod checkins;
mod credentials;
pub(crate) mod member_feeds;
mod serve;

pub(crate) use credentials::Credentials;

/// A problem is reported only after this time, except missing credentials. A new session needs time for its first responses, and an
/// API server needs time for a restart.
const GRACE: Duration = Duration::from_secs(6);

/// The longest delay, in milliseconds, before a session connects again after the credentials were missing.
const MAX_RECONNECT_DELAY: u64 = 5_000;

/// The objects that a session reads only because meshes need them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Interest {
    /// The member's Services that other members may use, and the mirrored Services through which the member uses others' Services.
    pub(crate) services: BTreeSet<ObjectName>,
    /// Namespaces whose pods are exported.
    pub(crate) pod_namespaces: BTreeSet<String>,
}

impl Interest {
    fn service_namespaces(&self) -> BTreeSet<String> {
        self.services.iter().map(|name| name.namespace.clone()).collect()
    }
}

/// The connection to the member's API server.
#[derive(Clone)]
struct Connection {
    credentials: Credentials,
    /// The client and the Lease for writes. `None` = the credentials were never usable.
    writer: Option<Writer>,
    /// Why the API server does not answer the probe. `None` = it answers the probe, or was not probed yet.
    unresponsive: Option<String>,
    /// `metadata.uid` of kube-system.
    uid: Option<String>,
    /// `gitVersion` of the API server.
    version: Option<String>,
    /// Since when the observation has not been fresh. `None` = the observation is fresh.
    not_fresh_since: Option<Instant>,
}

/// The client and the Lease for writes into a member.
#[derive(Clone)]
pub(crate) struct Writer {
    /// Sends requests only while this replica may write into the member.
    pub(crate) client: Client,
    /// The Lease in the member. `None` in the hub, for which the election has the Lease.
    pub(crate) fence: Option<Arc<Fence>>,
    /// Ends the tasks of the fence when the connection is replaced.
    _end: Arc<DropGuard>,
}

impl Writer {
    fn new(identity: &ClusterIdentity, hub: &Hub, client: &Client) -> Self {
        let election = Arc::clone(&hub.election);
        let end = CancellationToken::new();
        let (permit, fence) = if *identity == ClusterIdentity::Local {
            (Permit::Hub(election), None)
        } else {
            let member = identity.to_string();
            let fence = Fence::new(Arc::clone(&election), member, &hub.id, client.clone(), end.clone());
            let fence = Arc::new(fence);
            (Permit::Member(election, Arc::clone(&fence)), Some(fence))
        };
        Self {
            client: guard(client.clone(), permit),
            fence,
            _end: Arc::new(end.drop_guard()),
        }
    }
}

/// The handle of a session. Dropping it stops the session.
pub(crate) struct Session {
    shared: Arc<Shared>,
    interest: watch::Sender<Interest>,
    cleanup_only: watch::Sender<bool>,
    _end: DropGuard,
}

struct Shared {
    identity: ClusterIdentity,
    /// The memory budget of the member.
    account: Account,
    feeds: MemberFeeds,
    connection: Mutex<Connection>,
    changed: Changed,
}

impl Shared {
    /// With `is_charged`, the rows of the feeds are charged to the member's memory budget.
    fn new(identity: ClusterIdentity, account: Account, is_charged: bool, changed: Changed) -> Self {
        Self {
            feeds: MemberFeeds::new(identity.to_string(), is_charged.then_some(&account), &changed),
            account,
            identity,
            connection: Mutex::new(Connection {
                credentials: Credentials::Pending,
                writer: None,
                unresponsive: None,
                uid: None,
                version: None,
                not_fresh_since: Some(Instant::now()),
            }),
            changed,
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the connection and wakes the reconcile loop.
    fn update_connection(&self, change: impl FnOnce(&mut Connection)) {
        change(&mut self.connection());
        self.changed.notify_one();
    }
}

impl Session {
    /// Starts a session, which reads the credentials first.
    pub(crate) fn start(identity: ClusterIdentity, hub: Arc<Hub>, changed: Changed) -> Self {
        let end = CancellationToken::new();
        let (interest, interest_receiver) = watch::channel(Interest::default());
        let (cleanup_only, cleanup_only_receiver) = watch::channel(false);
        let account = hub.memory.account(&identity.to_string());
        // The hub is trusted, so its objects are not charged.
        let is_charged = identity != ClusterIdentity::Local;
        let shared = Arc::new(Shared::new(identity, account, is_charged, changed));
        tokio::spawn(supervise(
            Arc::clone(&shared),
            hub,
            interest_receiver,
            cleanup_only_receiver,
            end.clone(),
        ));
        Self {
            shared,
            interest,
            cleanup_only,
            _end: end.drop_guard(),
        }
    }

    /// Sets which objects the session reads because meshes need them.
    pub(crate) fn set_interest(&self, interest: &Interest) {
        self.interest.send_if_modified(|current| {
            let has_changed = current != interest;
            if has_changed {
                self.shared.feeds.set_interest(interest);
                current.clone_from(interest);
            }
            has_changed
        });
    }

    /// Sets whether the member is only cleaned up, because each of its meshes is being deleted or does not contain it any more.
    ///
    /// If so, the last usable credentials stay in use after the Secret is deleted: the deletion of a namespace may delete the Secrets
    /// first, and people who remove an entry often delete its Secret at the same time.
    pub(crate) fn set_cleanup_only(&self, cleanup_only: bool) {
        self.cleanup_only
            .send_if_modified(|current| std::mem::replace(current, cleanup_only) != cleanup_only);
    }

    /// Returns the current observation of the member.
    pub(crate) fn observe(&self) -> Observation<Member> {
        let mut connection = self.shared.connection();
        if let Credentials::Missing(why) = &connection.credentials {
            return Observation::Missing(why.clone());
        }
        let problem = connection.unresponsive.clone().or_else(|| self.shared.feeds.problem());
        connection.not_fresh_since = problem
            .as_ref()
            .map(|_| connection.not_fresh_since.unwrap_or_else(Instant::now));
        let uid = connection.uid.clone();
        drop(connection);
        if !self.shared.feeds.have_answers() {
            return Observation::Unreachable(
                problem.unwrap_or_else(|| "it is being read for the first time".to_owned()),
            );
        }
        let mut member = self.shared.feeds.member(uid, &self.interest.borrow());
        self.shared.feeds.mark_silent(&mut member, problem.is_none());
        match problem {
            None => Observation::Fresh(member),
            Some(why) => Observation::Stale(member, why),
        }
    }

    /// Reads all objects of the member again. Until then the observation is not fresh.
    pub(crate) fn read_again(&self) {
        self.shared.feeds.read_again(feed::Cluster::Same);
    }

    /// Whether Nodes or Peers are being read again.
    pub(crate) fn needs_lists(&self) -> bool {
        self.shared.feeds.need_lists()
    }

    /// The time at which the next node becomes silent if no check-in of its kg arrives.
    pub(crate) fn silence_due(&self) -> Option<Instant> {
        self.shared.feeds.silence_due()
    }

    /// Whether the member has been without a fresh observation for less than [`GRACE`]. If so, its problem is not reported
    /// yet. False if the credentials are missing.
    pub(crate) fn is_settling(&self) -> bool {
        let connection = self.shared.connection();
        !matches!(connection.credentials, Credentials::Missing(_))
            && connection.not_fresh_since.is_some_and(|since| since.elapsed() < GRACE)
    }

    /// Returns the client and the Lease for writes. `None` = the credentials are missing, unusable or not read yet.
    pub(crate) fn writer(&self) -> Option<Writer> {
        let connection = self.shared.connection();
        match connection.credentials {
            Credentials::Ready(..) => connection.writer.clone(),
            Credentials::Pending | Credentials::Missing(_) => None,
        }
    }

    /// Whether the API server does not answer the probe. Then writes would fail, too.
    pub(crate) fn is_unresponsive(&self) -> bool {
        self.shared.connection().unresponsive.is_some()
    }

    /// When the credentials in use expire. `None` = their expiry is unknown, or no credentials are in use.
    pub(crate) fn expiry(&self) -> Option<Expiry> {
        match self.shared.connection().credentials {
            Credentials::Ready(_, expiry) => expiry,
            Credentials::Pending | Credentials::Missing(_) => None,
        }
    }

    /// `gitVersion` of the API server. `None` = no probe has succeeded yet.
    pub(crate) fn version(&self) -> Option<String> {
        self.shared.connection().version.clone()
    }

    /// The feeds. Writers take the preconditions of deletes from them, and store the objects that their writes return.
    pub(crate) fn feeds(&self) -> MemberFeeds {
        self.shared.feeds.clone()
    }

    /// Returns the state of the session for `/debug/state`.
    pub(crate) fn dump(&self) -> serde_json::Value {
        let connection = self.shared.connection().clone();
        let credentials = match &connection.credentials {
            Credentials::Pending => "being read",
            Credentials::Ready(..) => "in use",
            Credentials::Missing(why) => why,
        };
        serde_json::json!({
            "credentials": credentials,
            "silent": connection.unresponsive,
            "uid": connection.uid,
            "version": connection.version,
            "tables": self.shared.feeds.dump(),
        })
    }
}

/// Runs a session until its handle is dropped. Connects again when the credentials change or a connection ends.
async fn supervise(
    shared: Arc<Shared>,
    hub: Arc<Hub>,
    interest_receiver: watch::Receiver<Interest>,
    mut cleanup_only: watch::Receiver<bool>,
    end: CancellationToken,
) {
    let mut watches = JoinSet::new();
    let mut credentials = credentials::follow(&shared.identity, &hub, &shared.account, &mut watches);
    let work = async {
        let (mut was_missing, mut last_usable) = (false, None);
        loop {
            let current = credentials.borrow_and_update().clone();
            let is_missing = matches!(current, Credentials::Missing(_));
            let current = match current {
                Credentials::Missing(why) if *cleanup_only.borrow_and_update() => last_usable
                    .clone()
                    .map_or(Credentials::Missing(why), |(client, expiry)| {
                        Credentials::Ready(client, expiry)
                    }),
                current => current,
            };
            if let Credentials::Ready(client, expiry) = &current {
                last_usable = Some((client.clone(), *expiry));
            }
            let is_back = std::mem::replace(&mut was_missing, is_missing) && !is_missing;
            let serve = async {
                match &current {
                    Credentials::Pending => std::future::pending().await,
                    Credentials::Missing(why) => {
                        shared.update_connection(|connection| {
                            connection.credentials = Credentials::Missing(why.clone());
                        });
                        std::future::pending().await
                    }
                    Credentials::Ready(client, expiry) => {
                        if is_back {
                            tokio::time::sleep(reconnect_delay(&shared.identity)).await;
                        }
                        let writer = Writer::new(&shared.identity, &hub, client);
                        serve::serve(&shared, (client, *expiry), writer, interest_receiver.clone()).await;
                    }
                }
            };
            tokio::select! {
                () = serve => {}
                Ok(()) = cleanup_only.changed(), if is_missing => {}
                changed = credentials.changed() => if changed.is_err() {
                    tracing::error!(member = %shared.identity, "the task that watches the kubeconfig Secret ended unexpectedly; starting it again");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    watches = JoinSet::new();
                    credentials = credentials::follow(&shared.identity, &hub, &shared.account, &mut watches);
                },
            }
        }
    };
    tokio::select! {
        () = work => {}
        () = end.cancelled() => {}
    }
}

/// The delay before the session connects again after the credentials were missing. Sessions that lost their credentials at the same
/// time must not list all objects at the same time. The delay of one member is always the same.
fn reconnect_delay(identity: &ClusterIdentity) -> Duration {
    let mut hasher = DefaultHasher::new();
    identity.to_string().hash(&mut hasher);
    Duration::from_millis(hasher.finish() % MAX_RECONNECT_DELAY)
}

/// Returns the problem of the first feed that has one. `None` = each feed is current, or its kind is not installed.
fn first_problem(trusts: impl IntoIterator<Item = Trust>) -> Option<String> {
    trusts.into_iter().find_map(|trust| match trust {
        Trust::Live | Trust::Absent => None,
        Trust::Pending => Some("it is being read for the first time".to_owned()),
        Trust::Broken(why) => Some(why),
        Trust::Denied(why) => Some(format!("{why}: apply the member's RBAC manifests")),
    })
}

/// Sends a request of the probe, with a timeout.
async fn with_timeout<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, ProbeError> {
    match tokio::time::timeout(Duration::from_secs(5), request).await {
        Ok(answer) => answer.map_err(|error| {
            tracing::debug!(error = %api_error::sanitize(&error.to_string()), "request failed");
            ProbeError {
                is_answer: api_error::is_answer(&error),
                why: api_error::describe(&error),
            }
        }),
        Err(_) => Err(ProbeError {
            is_answer: false,
            why: api_error::NO_ANSWER.to_owned(),
        }),
    }
}

/// A request of the probe that failed.
#[derive(Debug)]
struct ProbeError {
    /// Whether the API server responded. If so, it is running.
    is_answer: bool,
    why: String,
}

#[cfg(test)]
mod tests;
