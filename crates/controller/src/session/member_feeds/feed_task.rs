//! The task that keeps one [`Feed`] (a local table of one kind of object) up to date by list and watch. Each connection to a member
//! spawns one such task for each feed. [`FeedTask`] hides the type of the feed's rows.

use futures::future::BoxFuture;

use super::OnDemandFeed;
use crate::feed::{Feed, WatchedResource, follow};

/// The task of one feed: lists and watches the feed's resource.
pub(in crate::session) struct FeedTask {
    /// [`OnDemandFeed::id`]; unused for a feed that every member has.
    pub(in crate::session) feed_id: u64,
    follow: BoxFuture<'static, ()>,
}

impl FeedTask {
    pub(super) fn new<V: Clone + PartialEq + Send + 'static>(resource: WatchedResource, feed: &Feed<V>) -> Self {
        let feed = feed.clone();
        Self {
            feed_id: 0,
            follow: Box::pin(async move { follow(&resource, &feed).await }),
        }
    }

    pub(super) fn on_demand<V: Clone + PartialEq + Send + 'static>(
        resource: WatchedResource,
        feed: &OnDemandFeed<V>,
    ) -> Self {
        Self {
            feed_id: feed.id,
            ..Self::new(resource, &feed.feed)
        }
    }

    /// Keeps the feed up to date. Never returns.
    pub(in crate::session) fn run(self) -> BoxFuture<'static, ()> {
        self.follow
    }
}
