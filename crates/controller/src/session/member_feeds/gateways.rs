//! Combines the SandboxGateways of a member with the state of their pods.

use std::collections::BTreeMap;

use clustermesh_core::{mesh::ObjectName, observe::Gateway};

use super::{MemberFeeds, rows_by_object_name};

impl MemberFeeds {
    /// Returns the gateways. A gateway is ready if the pod that published it exists and is Ready.
    pub(super) fn gateways(&self) -> BTreeMap<ObjectName, Gateway> {
        let pods = rows_by_object_name(&self.gateway_pods);
        let gateways = rows_by_object_name(&self.gateways).into_iter();
        gateways
            .map(|(name, (gateway, pod_uid))| {
                let pod = pods.get(&name).filter(|(uid, _)| *uid == pod_uid);
                let (exists, ready) = (pod.is_some(), pod.is_some_and(|(_, ready)| *ready));
                let gateway = Gateway {
                    ready,
                    exists,
                    ..gateway
                };
                (name, gateway)
            })
            .collect()
    }
}
