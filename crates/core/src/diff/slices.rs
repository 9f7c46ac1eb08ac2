//! Compares the EndpointSlices of mirrored Services.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{Desired, Differ, Item, Step, differing};
use crate::{
    mesh::ObjectName,
    observe::{Member, Owner},
    plan::PlannedSlice,
};

impl Differ<'_> {
    pub(super) fn slices(&self, member: &Member) -> Vec<Arc<Step>> {
        type ServiceAndSlice = (String, PlannedSlice);
        let observed: BTreeMap<ObjectName, (&Owner, ServiceAndSlice)> = member
            .slices
            .iter()
            .filter_map(|(name, slice)| {
                let planned = PlannedSlice {
                    v6: slice.v6,
                    ports: slice.ports.clone(),
                    endpoints: slice.endpoints.clone(),
                };
                Some((
                    name.clone(),
                    (slice.managed.as_ref()?, (slice.service.clone(), planned)),
                ))
            })
            .collect();
        let existing = observed
            .iter()
            .map(|(name, (owner, slice))| (name, *owner, Some(slice)));
        let desired: Vec<Desired<'_, ObjectName, ServiceAndSlice>> = self.desired(|target| {
            let mut slices = Vec::new();
            for (service, planned) in &target.services {
                for (name, slice) in &planned.slices {
                    let name = ObjectName {
                        namespace: service.namespace.clone(),
                        name: name.clone(),
                    };
                    let value = (service.name.clone(), slice.clone());
                    slices.push((Cow::Owned(name), &*planned.source, Cow::Owned(value)));
                }
            }
            slices.into_iter()
        });
        let service_of = |name: &ObjectName, service: &str| ObjectName {
            namespace: name.namespace.clone(),
            name: service.to_owned(),
        };
        let services: BTreeSet<ObjectName> = desired
            .iter()
            .map(|desired| service_of(&desired.name, &desired.value.0))
            .collect();
        // An orphaned slice is deleted if a mesh plans slices for the same Service.
        let superseded =
            |name: &ObjectName, (service, _): &ServiceAndSlice| services.contains(&service_of(name, service));
        let item = |name, slice: Option<ServiceAndSlice>| Item::Slice(name, slice.map(Box::new));
        self.compare(
            existing,
            desired,
            item,
            superseded,
            |(_, old): &ServiceAndSlice, (_, new): &ServiceAndSlice| {
                differing([
                    ("addressType", old.v6 != new.v6),
                    ("ports", old.ports != new.ports),
                    ("endpoints", old.endpoints != new.endpoints),
                ])
            },
        )
    }
}
