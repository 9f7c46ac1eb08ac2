//! Keeps one [`Feed`] up to date: lists, watches, resumes a broken watch, and lists again where necessary. [`follow`] never returns;
//! dropping its future stops it.

use std::{collections::BTreeMap, ops::RangeInclusive, time::Duration};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use clustermesh_access::{bounds::over_budget, memory::OverBudget};
use clustermesh_daemon::random;
use futures::{StreamExt, TryStreamExt};
use kube::{
    Api, Error,
    api::{ApiResource, DynamicObject, ListParams, WatchEvent, WatchParams},
};
use tokio::{sync::watch, time::Instant};

use super::{
    Feed, List, Trust, identity,
    not_found::{Cause, find_cause},
};
use crate::api_error;

/// Objects in one page of a list; a page of Nodes has about 1 MB. If a page exceeds a memory limit ([`OverBudget`]), it is requested
/// again with half as many objects, down to one; later pages keep this size. So a list does not fail because
/// 50 of its objects exceed the limit of one response.
const PAGE_SIZE: u32 = 50;
/// At most this many objects of one kind are read. Without a limit a hostile API server could send objects forever.
const MAX_OBJECTS: usize = 50_000;
/// At most this many pages of one list are requested, repeated requests included. [`MAX_OBJECTS`] alone does not limit the pages, because
/// a server may send empty ones.
const MAX_PAGES: usize = 4 * MAX_OBJECTS / PAGE_SIZE as usize;
/// The longest `continue` token. The next request contains it in the URL.
const MAX_TOKEN: usize = 16 * 1024;
/// Timeout of the request for one page of a list, and of the start of a watch.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The API server ends a watch after a random number of seconds in this range (`timeoutSeconds`). The watch is then resumed. So
/// watches that started together are not resumed together.
const WATCH_SECONDS: RangeInclusive<u32> = 240..=290;
/// Without an event for this long, the connection is dead: even the end of the watch by `timeoutSeconds` did not arrive.
const IDLE_TIMEOUT: Duration = Duration::from_secs(*WATCH_SECONDS.end() as u64 + 15);
/// A watch that lasts this long counts as established, and resets the backoff.
const ESTABLISHED_AFTER: Duration = Duration::from_secs(20);
/// The pause before a kind that does not exist is requested again.
const ABSENT_RETRY: Duration = Duration::from_secs(3);

/// What to list and watch.
#[derive(Debug, Clone)]
pub(crate) struct WatchedResource {
    /// Group, version and name of the kind, by which discovery documents name it.
    pub(crate) kind: ApiResource,
    /// The objects of the kind, in one namespace or in all namespaces.
    pub(crate) api: Api<DynamicObject>,
    /// The name of the resource in messages: `nodes`, `secrets in namespace x`.
    pub(crate) description: String,
    /// The cluster that contains the resource, for logs.
    pub(crate) cluster: String,
    /// Label selector; empty = all objects.
    pub(crate) labels: String,
    /// Field selector; empty = all objects.
    pub(crate) fields: String,
}

/// Keeps `feed` up to date. Never returns.
pub(crate) async fn follow<V: Clone + PartialEq>(resource: &WatchedResource, feed: &Feed<V>) {
    let mut progress = Progress {
        backoff: new_backoff(),
        has_expired: false,
        is_suspect: false,
        required_list: feed.required_list.subscribe(),
    };
    loop {
        let number = *progress.required_list.borrow_and_update();
        let listed = tokio::select! {
            listed = list(resource, feed, number) => listed,
            () = list_required(&mut progress.required_list) => continue,
        };
        let ended = match listed {
            Ok(list) => {
                let version = list.version.clone();
                feed.replace(list, !progress.is_suspect);
                watch(resource, feed, version, &mut progress).await
            }
            Err(error) => Err(error),
        };
        if let Err(mut error) = ended {
            if matches!(error, FollowError::NotFound(_)) {
                let trust = feed.trust();
                if trust == Trust::Live {
                    // The feed must not count as current while discovery takes its time.
                    report(resource, feed, &error, &mut progress);
                }
                let cause = if trust == Trust::Absent {
                    // Discovery has shown it already.
                    Cause::NotServed
                } else {
                    let client = resource.api.clone().into_client();
                    tokio::select! {
                        biased;
                        () = list_required(&mut progress.required_list) => continue,
                        cause = find_cause(&client, &resource.kind) => cause,
                    }
                };
                error = FollowError::NotFound(cause);
            }
            let pause = report(resource, feed, &error, &mut progress);
            progress.wait(pause).await;
        }
    }
}

/// The state of [`follow`] between attempts.
struct Progress {
    backoff: ExponentialBackoff,
    /// Whether a 410 response (version expired) arrived since the last established watch.
    has_expired: bool,
    /// Since the last established watch the server has repeated 410 or exceeded a limit. Its lists do not count as current until a
    /// watch is established.
    is_suspect: bool,
    /// Changes when a new list is required.
    required_list: watch::Receiver<u64>,
}

impl Progress {
    /// Resets the backoff and forgets a 410 response, after a watch was established.
    fn reset(&mut self) {
        self.backoff = new_backoff();
        self.has_expired = false;
    }

    /// Waits for `pause`; `None` = for the next pause of the backoff. Returns at once, and true, when a new list is required.
    async fn wait(&mut self, pause: Option<Duration>) -> bool {
        let pause = pause.unwrap_or_else(|| self.backoff.next().unwrap_or(Duration::from_secs(30)));
        tokio::select! {
            () = tokio::time::sleep(pause) => false,
            () = list_required(&mut self.required_list) => true,
        }
    }
}

/// Waits until a new list is required.
async fn list_required(required: &mut watch::Receiver<u64>) {
    // An error would mean that the sender is gone. The feed has it, so this does not happen.
    if required.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Creates a backoff: half a second, doubling to half a minute, with jitter, without a limit on attempts.
fn new_backoff() -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(500))
        .with_max_delay(Duration::from_secs(30))
        .with_jitter()
        .without_max_times()
        .build()
}

/// Why a list or a watch failed.
#[derive(Debug)]
enum FollowError {
    /// The version to resume from is too old (410). The remedy is a new list. There is a pause before it, because a server may respond
    /// with 410 every time.
    Expired,
    /// There are too many objects or pages, or a `continue` token is too long.
    TooMany,
    /// A response, an event or all data of the member exceed a memory limit.
    OverBudget(OverBudget),
    /// The response was 404.
    NotFound(Cause),
    Api(Error),
    TimedOut,
}

impl From<Error> for FollowError {
    fn from(error: Error) -> Self {
        match error {
            Error::Api(status) if status.code == 410 => Self::Expired,
            Error::Api(status) if status.code == 404 => Self::NotFound(Cause::Unknown),
            error => over_budget(&error).map_or(Self::Api(error), Self::OverBudget),
        }
    }
}

impl From<OverBudget> for FollowError {
    fn from(over: OverBudget) -> Self {
        Self::OverBudget(over)
    }
}

/// Records a failure as the [`Trust`] of the feed, except the first 410 since the last established watch. Returns the pause before the next
/// attempt; `None` = the next pause of the backoff.
fn report<V: Clone + PartialEq>(
    resource: &WatchedResource,
    feed: &Feed<V>,
    error: &FollowError,
    progress: &mut Progress,
) -> Option<Duration> {
    let what = &resource.description;
    let (trust, pause) = match error {
        // A single 410 (expired) is normal. A server that repeats it offers no usable list and watch.
        FollowError::Expired if !progress.has_expired => {
            progress.has_expired = true;
            return None;
        }
        FollowError::Expired => (
            Trust::Broken(format!("its API server calls every version of {what} too old (410)")),
            None,
        ),
        FollowError::TooMany => (
            Trust::Broken(format!(
                "its API server lists more than {MAX_OBJECTS} {what}, more than {MAX_PAGES} pages of them, or sends a `continue` token of \
                 more than {} KiB",
                MAX_TOKEN / 1024
            )),
            None,
        ),
        FollowError::OverBudget(over) => (Trust::Broken(format!("{over} ({what})")), None),
        FollowError::TimedOut => (Trust::Broken(api_error::NO_ANSWER.to_owned()), None),
        FollowError::NotFound(Cause::NotServed) => {
            progress.backoff = new_backoff();
            (Trust::Absent, Some(ABSENT_RETRY))
        }
        FollowError::NotFound(Cause::DiscoveryForbidden) => (
            Trust::Denied(format!(
                "its API server does not find {what} (404), and the account may not read the discovery documents (403), which the \
                 ClusterRole system:discovery allows"
            )),
            None,
        ),
        FollowError::NotFound(Cause::Unknown) => (
            Trust::Broken(format!(
                "its API server, or a proxy before it, does not find {what} (404)"
            )),
            None,
        ),
        FollowError::Api(Error::Api(status)) if status.code == 403 => (
            Trust::Denied(format!("the account may not list and watch {what} (403)")),
            None,
        ),
        FollowError::Api(error) => {
            tracing::debug!(what, error = %api_error::sanitize(&error.to_string()), "list or watch failed");
            (Trust::Broken(api_error::describe(error)), None)
        }
    };
    progress.is_suspect |= matches!(
        error,
        FollowError::Expired | FollowError::TooMany | FollowError::OverBudget(_)
    );
    if feed.set_trust(trust.clone()) {
        tracing::info!(what, cluster = resource.cluster, state = ?trust, "list or watch failed; retrying");
    }
    pause
}

/// Lists all objects, page by page. `number` is the value of [`Feed::required_list`] at the start.
async fn list<V: Clone + PartialEq>(
    resource: &WatchedResource,
    feed: &Feed<V>,
    number: u64,
) -> Result<List<V>, FollowError> {
    let mut list = List {
        objects: Vec::new(),
        version: String::new(),
        number,
        charge: feed.list_charge(),
    };
    let mut params = ListParams::default();
    if !resource.labels.is_empty() {
        params = params.labels(&resource.labels);
    }
    if !resource.fields.is_empty() {
        params = params.fields(&resource.fields);
    }
    let mut size = PAGE_SIZE;
    for _ in 0..MAX_PAGES {
        params.limit = Some(size);
        let answer = tokio::time::timeout(REQUEST_TIMEOUT, resource.api.list(&params)).await;
        let page = match answer.map_err(|_| FollowError::TimedOut)?.map_err(FollowError::from) {
            Ok(page) => page,
            Err(FollowError::OverBudget(_)) if size > 1 => {
                size /= 2;
                continue;
            }
            Err(error) => return Err(error),
        };
        for object in page.items {
            let Some(object) = feed.convert(object) else { continue };
            list.add(object)?;
        }
        if list.objects.len() > MAX_OBJECTS {
            return Err(FollowError::TooMany);
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) if token.len() > MAX_TOKEN => return Err(FollowError::TooMany),
            Some(token) => params.continue_token = Some(token),
            None => {
                list.version = page.metadata.resource_version.unwrap_or_default();
                return Ok(list);
            }
        }
    }
    Err(FollowError::TooMany)
}

/// Watches from `version`. Resumes after a broken connection. Returns when a new list is required: `Ok` = [`Feed::read_again`] requires
/// it, `Err` = an error does.
async fn watch<V: Clone + PartialEq>(
    resource: &WatchedResource,
    feed: &Feed<V>,
    mut version: String,
    progress: &mut Progress,
) -> Result<(), FollowError> {
    let mut params = WatchParams::default().timeout(random::within(WATCH_SECONDS));
    if !resource.labels.is_empty() {
        params = params.labels(&resource.labels);
    }
    if !resource.fields.is_empty() {
        params = params.fields(&resource.fields);
    }
    loop {
        let opened = tokio::select! {
            opened = tokio::time::timeout(REQUEST_TIMEOUT, resource.api.watch(&params, &version)) => opened,
            () = list_required(&mut progress.required_list) => return Ok(()),
        };
        let error = match opened {
            Ok(Ok(stream)) => {
                if !progress.is_suspect {
                    feed.set_trust(Trust::Live);
                }
                let began = Instant::now();
                match consume_events(feed, stream.boxed(), &mut version, progress).await {
                    Ok(WatchEnd::Closed) => {
                        // A server may refuse a watch by closing it, before or after the first event. The pause avoids a busy
                        // loop.
                        if began.elapsed() <= ESTABLISHED_AFTER && progress.wait(None).await {
                            return Ok(());
                        }
                        continue;
                    }
                    Ok(WatchEnd::ListRequired) => return Ok(()),
                    Err(error) => error,
                }
            }
            Ok(Err(error)) => error.into(),
            Err(_) => FollowError::TimedOut,
        };
        // After a lost connection the last version is still valid. After any other error a new list is needed.
        if !matches!(
            error,
            FollowError::TimedOut | FollowError::Api(Error::HyperError(_) | Error::Service(_) | Error::ReadEvents(_))
        ) {
            return Err(error);
        }
        report(resource, feed, &error, progress);
        if progress.wait(None).await {
            return Ok(());
        }
    }
}

/// Why a watch ended without an error.
enum WatchEnd {
    /// The server closed it.
    Closed,
    /// [`Feed::read_again`] requires a new list.
    ListRequired,
}

/// Stores the events in the feed until the stream ends or fails.
async fn consume_events<V: Clone + PartialEq>(
    feed: &Feed<V>,
    mut stream: futures::stream::BoxStream<'_, Result<WatchEvent<DynamicObject>, Error>>,
    version: &mut String,
    progress: &mut Progress,
) -> Result<WatchEnd, FollowError> {
    let (began, mut is_established) = (Instant::now(), false);
    loop {
        let established = tokio::time::sleep_until(began + ESTABLISHED_AFTER);
        let next = tokio::select! {
            next = tokio::time::timeout(IDLE_TIMEOUT, stream.try_next()) => next,
            () = established, if !is_established => {
                is_established = true;
                if std::mem::take(&mut progress.is_suspect) {
                    feed.set_trust(Trust::Live);
                }
                progress.reset();
                continue;
            }
            () = list_required(&mut progress.required_list) => return Ok(WatchEnd::ListRequired),
        };
        let event = match next {
            Err(_) => return Err(FollowError::TimedOut),
            Ok(event) => event?,
        };
        match event {
            None => return Ok(WatchEnd::Closed),
            Some(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                *version = object.metadata.resource_version.clone().unwrap_or_default();
                feed.put(object)?;
                if feed.read(BTreeMap::len) > MAX_OBJECTS {
                    return Err(FollowError::TooMany);
                }
            }
            Some(WatchEvent::Deleted(object)) => {
                *version = object.metadata.resource_version.clone().unwrap_or_default();
                if let Some((name, ..)) = identity(&object.metadata) {
                    feed.remove(&name);
                }
            }
            Some(WatchEvent::Bookmark(bookmark)) => *version = bookmark.metadata.resource_version,
            Some(WatchEvent::Error(status)) => return Err(Error::Api(status).into()),
        }
    }
}

#[cfg(test)]
mod tests;
