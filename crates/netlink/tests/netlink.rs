//! Exchanges messages with the real kernel in a network namespace. Needs root.

use std::{
    collections::BTreeSet,
    net::Ipv4Addr,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use clustermesh_netlink::{Errno, Error, Event, Events, Protocol, Socket, Subscription, link};
use netlink_packet_core::NetlinkSerializable;
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    link::{InfoKind, LinkAttribute, LinkFlags, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage},
};
use nix::sched::{CloneFlags, unshare};

/// `RTNLGRP_LINK` (linux/rtnetlink.h).
const LINK_GROUP: u32 = 1;

/// Runs the closure on a thread in a network namespace of its own.
fn in_namespace<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET)
                .expect("this test creates a network namespace and needs root (CAP_SYS_ADMIN)");
            run()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn open() -> Socket {
    Socket::open(Protocol::Route).expect("a socket")
}

fn name(link: &LinkMessage) -> Option<String> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })
}

fn mtu(link: &LinkMessage) -> Option<u32> {
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    })
}

fn link_names(socket: &Socket) -> BTreeSet<String> {
    let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
    let names = socket.dump(&request, |answer| match answer {
        RouteNetlinkMessage::NewLink(link) => name(&link),
        _ => None,
    });
    names.expect("a dump").into_iter().collect()
}

#[test]
fn link_is_created_changed_and_deleted() {
    in_namespace(|| {
        let socket = open();
        assert_eq!(link::by_name(&socket, "probe").unwrap(), None);
        let index = link::create(&socket, "probe", InfoKind::Bridge).unwrap();
        link::set_mtu(&socket, index, 1400).unwrap();
        let found = link::by_name(&socket, "probe").unwrap().unwrap();
        assert_eq!((found.header.index, mtu(&found)), (index, Some(1400)));
        assert!(!found.header.flags.contains(LinkFlags::Up));
        link::set_up(&socket, index).unwrap();
        let found = link::by_index(&socket, index).unwrap().unwrap();
        assert_eq!(name(&found).as_deref(), Some("probe"));
        assert!(found.header.flags.contains(LinkFlags::Up));
        assert_eq!(link_names(&socket), ["lo", "probe"].map(str::to_owned).into());

        let error = link::create(&socket, "probe", InfoKind::Bridge).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::EXIST), "{error}");
        link::delete(&socket, index).unwrap();
        // The deletion of a missing link is no error.
        link::delete(&socket, index).unwrap();
        assert_eq!(link::by_index(&socket, index).unwrap(), None);
    });
}

/// A request for the route to an IPv4 address.
fn lookup(to: Ipv4Addr) -> RouteNetlinkMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = AddressFamily::Inet;
    message.header.destination_prefix_length = 32;
    message
        .attributes
        .push(RouteAttribute::Destination(RouteAddress::Inet(to)));
    RouteNetlinkMessage::GetRoute(message)
}

#[test]
fn refusal_contains_the_kernels_reason() {
    in_namespace(|| {
        let socket = open();
        let error = socket.get(&lookup(Ipv4Addr::new(10, 0, 0, 1))).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::NETUNREACH), "{error}");
        let RouteNetlinkMessage::GetRoute(mut message) = lookup(Ipv4Addr::LOCALHOST) else {
            unreachable!()
        };
        message.header.table = 1;
        let error = socket.get(&RouteNetlinkMessage::GetRoute(message)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Invalid argument (os error 22): ipv4: Invalid values in header for route get request"
        );
        // The socket still works.
        assert_eq!(link_names(&socket), ["lo".to_owned()].into());
    });
}

#[test]
fn refused_dump_is_an_error_with_a_reason() {
    in_namespace(|| {
        let socket = open();
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.attributes.push(RouteAttribute::Table(5182));
        let request = RouteNetlinkMessage::GetRoute(message);
        let error = socket.dump(&request, Some).unwrap_err();
        assert_eq!(
            error.to_string(),
            "No such file or directory (os error 2): ipv4: FIB table does not exist"
        );
    });
}

/// A message that the kernel ignores.
struct Ignored;

impl NetlinkSerializable for Ignored {
    fn message_type(&self) -> u16 {
        netlink_packet_core::NLMSG_NOOP
    }

    fn buffer_len(&self) -> usize {
        0
    }

    fn serialize(&self, _buffer: &mut [u8]) {}
}

impl netlink_packet_core::NetlinkDeserializable for Ignored {
    type Error = netlink_packet_core::DecodeError;

    fn deserialize(_: &netlink_packet_core::NetlinkHeader, _: &[u8]) -> Result<Self, Self::Error> {
        Ok(Self)
    }
}

#[test]
fn ignored_message_times_out_unless_acknowledged() {
    let socket = open();
    assert!(matches!(socket.get(&Ignored), Err(Error::NoAnswer)));
    // `change` requests an acknowledgement, which the kernel also sends for a message that it ignores.
    socket.change(&Ignored).unwrap();
}

#[test]
fn dump_while_links_change_is_complete_or_interrupted() {
    in_namespace(|| {
        let socket = open();
        let lasting: BTreeSet<String> = (0..200).map(|number| format!("lasting{number}")).collect();
        for name in &lasting {
            link::create(&socket, name, InfoKind::Bridge).unwrap();
        }
        let (done, changer) = (AtomicBool::new(false), open());
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let index = link::create(&changer, "passing", InfoKind::Bridge).unwrap();
                    link::delete(&changer, index).unwrap();
                }
            });
            for _ in 0..20 {
                let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
                let names = socket.dump(&request, |answer| match answer {
                    RouteNetlinkMessage::NewLink(link) => name(&link).filter(|name| lasting.contains(name)),
                    _ => None,
                });
                match names {
                    Ok(names) => assert_eq!(
                        (names.len(), names.into_iter().collect()),
                        (lasting.len(), lasting.clone())
                    ),
                    // The links changed during every attempt.
                    Err(Error::Interrupted) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

#[test]
fn new_link_is_an_event() {
    in_namespace(|| {
        runtime().block_on(async {
            let subscription = Subscription {
                groups: &[LINK_GROUP],
                ..Subscription::default()
            };
            let mut events = Events::open(Protocol::Route, subscription).unwrap();
            let index = link::create(&open(), "probe", InfoKind::Bridge).unwrap();
            let arrived = events.next().await.unwrap();
            let Some(Event::Message(message)) = arrived.first() else {
                panic!("{arrived:?}");
            };
            let RouteNetlinkMessage::NewLink(link) = message.parse().unwrap() else {
                panic!("{message:?}");
            };
            assert_eq!((link.header.index, name(&link).as_deref()), (index, Some("probe")));
        });
    });
}

#[test]
fn overflow_of_the_receive_buffer_is_reported() {
    in_namespace(|| {
        runtime().block_on(async {
            let subscription = Subscription {
                groups: &[LINK_GROUP],
                receive_buffer: Some(4_096),
                ..Subscription::default()
            };
            let mut events = Events::open(Protocol::Route, subscription).unwrap();
            let socket = open();
            let index = link::create(&socket, "probe", InfoKind::Bridge).unwrap();
            for mtu in 1_280..1_380 {
                link::set_mtu(&socket, index, mtu).unwrap();
            }
            let arrived = events.next().await.unwrap();
            assert!(arrived.contains(&Event::Lost), "{arrived:?}");
            // Later events arrive again.
            link::set_mtu(&socket, index, 1_400).unwrap();
            let arrived = events.next().await.unwrap();
            assert!(matches!(arrived[..], [Event::Message(_), ..]), "{arrived:?}");
        });
    });
}
