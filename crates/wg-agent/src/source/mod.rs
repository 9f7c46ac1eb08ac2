//! What the agent works from: objects of its own cluster, and the node's network as it is without us. Nothing is written
//! here.

pub mod underlay;
