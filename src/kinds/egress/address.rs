//! Which addresses a URL from a payload may lead to.
//!
//! Sources: the IANA IPv4 and IPv6 Special-Purpose Address Registries (RFC 6890 and its updates), RFC 6052 and RFC 8215
//! (NAT64), RFC 3056 (6to4). An address that carries another inside (mapped, NAT64, 6to4) is judged by the one inside.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// What an operator opens and closes beyond the public Internet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EgressPolicy {
    /// Ranges that are reachable although they are not public (`JOBREQUEST_EGRESS_ALLOW`).
    pub allow: Vec<IpNet>,
    /// Ranges that are never reachable, public or allowed (`JOBREQUEST_EGRESS_DENY`).
    pub deny: Vec<IpNet>,
}

impl EgressPolicy {
    /// Both settings as lists of CIDRs or single addresses, separated by commas or white space.
    ///
    /// # Errors
    /// The first entry that is neither, as a sentence with the entry in it.
    pub fn parse(allow: &str, deny: &str) -> Result<Self, String> {
        Ok(Self { allow: parse_nets(allow)?, deny: parse_nets(deny)? })
    }

    /// Whether a connection to this address may be opened.
    ///
    /// # Errors
    /// The kind of address, when it may not: for an error message, without the address itself.
    pub fn check(&self, address: IpAddr) -> Result<(), &'static str> {
        let inner = carried(address);
        let within = |nets: &[IpNet]| {
            nets.iter().any(|net| net.contains(&address) || inner.is_some_and(|inner| net.contains(&inner)))
        };
        if within(&self.deny) {
            return Err("an address this install denies");
        }
        if within(&self.allow) {
            return Ok(());
        }
        not_public(inner.unwrap_or(address)).map_or(Ok(()), Err)
    }
}

fn parse_nets(list: &str) -> Result<Vec<IpNet>, String> {
    list.split(|c: char| c == ',' || c.is_whitespace())
        .filter(|entry| !entry.is_empty())
        .map(|entry| {
            entry
                .parse::<IpNet>()
                .or_else(|_| entry.parse::<IpAddr>().map(IpNet::from))
                .map_err(|_| format!("`{entry}` is not a CIDR such as 10.0.0.0/8 or fd00::/8"))
        })
        .collect()
}

/// The IPv4 address that an IPv6 address stands for.
fn carried(address: IpAddr) -> Option<IpAddr> {
    let IpAddr::V6(v6) = address else { return None };
    let octets = v6.octets();
    let at = |from: usize| Ipv4Addr::new(octets[from], octets[from + 1], octets[from + 2], octets[from + 3]);
    if let Some(mapped) = v6.to_ipv4_mapped() {
        Some(mapped.into())
    } else if in_v6(v6, Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96) {
        Some(at(12).into())
    } else if in_v6(v6, Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16) {
        Some(at(2).into())
    } else {
        None
    }
}

const V4_NOT_PUBLIC: &[(Ipv4Addr, u8, &str)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8, "an unspecified address"),
    (Ipv4Addr::new(10, 0, 0, 0), 8, "a private address"),
    (Ipv4Addr::new(100, 64, 0, 0), 10, "a carrier-grade NAT address"),
    (Ipv4Addr::new(127, 0, 0, 0), 8, "a loopback address"),
    // Azure's wire server: a public address that answers machines in Azure with their credentials
    (Ipv4Addr::new(168, 63, 129, 16), 32, "a cloud metadata address"),
    (Ipv4Addr::new(169, 254, 0, 0), 16, "a link-local or cloud metadata address"),
    (Ipv4Addr::new(172, 16, 0, 0), 12, "a private address"),
    (Ipv4Addr::new(192, 0, 0, 0), 24, "a protocol-assignment address"),
    (Ipv4Addr::new(192, 0, 2, 0), 24, "a documentation address"),
    (Ipv4Addr::new(192, 88, 99, 0), 24, "a 6to4 relay address"),
    (Ipv4Addr::new(192, 168, 0, 0), 16, "a private address"),
    (Ipv4Addr::new(198, 18, 0, 0), 15, "a benchmarking address"),
    (Ipv4Addr::new(198, 51, 100, 0), 24, "a documentation address"),
    (Ipv4Addr::new(203, 0, 113, 0), 24, "a documentation address"),
    (Ipv4Addr::new(224, 0, 0, 0), 4, "a multicast address"),
    (Ipv4Addr::new(240, 0, 0, 0), 4, "a reserved or broadcast address"),
];

const V6_NOT_PUBLIC: &[(Ipv6Addr, u8, &str)] = &[
    (Ipv6Addr::UNSPECIFIED, 128, "an unspecified address"),
    (Ipv6Addr::LOCALHOST, 128, "a loopback address"),
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23, "a protocol-assignment address"),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32, "a documentation address"),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20, "a documentation address"),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, "a private address"),
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10, "a link-local address"),
    (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8, "a multicast address"),
];

/// Everything the registries call globally reachable, and within IPv6 only what lies in 2000::/3, is public.
fn not_public(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(v4) => V4_NOT_PUBLIC.iter().find(|(net, bits, _)| in_v4(v4, *net, *bits)).map(|(_, _, what)| *what),
        IpAddr::V6(v6) => V6_NOT_PUBLIC
            .iter()
            .find(|(net, bits, _)| in_v6(v6, *net, *bits))
            .map(|(_, _, what)| *what)
            .or_else(|| (v6.segments()[0] >> 13 != 1).then_some("an address outside the public range")),
    }
}

fn in_v4(address: Ipv4Addr, net: Ipv4Addr, bits: u8) -> bool {
    (u32::from(address) ^ u32::from(net)) >> (32 - u32::from(bits)) == 0
}

fn in_v6(address: Ipv6Addr, net: Ipv6Addr, bits: u8) -> bool {
    (u128::from(address) ^ u128::from(net)) >> (128 - u32::from(bits)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(address: &str) -> Result<(), &'static str> {
        EgressPolicy::default().check(address.parse().unwrap())
    }

    #[test]
    fn no_address_off_the_public_internet_is_reachable() {
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "10.255.255.255",
            "100.64.0.1",
            "100.100.100.200",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "168.63.129.16",
            "169.254.0.1",
            "169.254.169.254",
            "169.254.170.2",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.0.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.9",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::93.184.216.34",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.5",
            "::ffff:169.254.169.254",
            "::ffff:0:127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b::a00:1",
            "64:ff9b:1::1",
            "2002:7f00:1::1",
            "2002:a9fe:a9fe::",
            "2002:c0a8:1::",
            "2001::1",
            "2001:2::1",
            "2001:10::1",
            "2001:db8::1",
            "3fff::1",
            "fc00::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
            "ff0e::1",
            "100::1",
            "5f00::1",
            "4000::1",
            "8000::1",
        ] {
            assert!(judged(address).is_err(), "{address} must be refused");
        }
    }

    #[test]
    fn public_addresses_are_reachable_also_through_a_translator() {
        for address in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.0",
            "93.184.216.34",
            "100.63.255.255",
            "100.128.0.1",
            "126.255.255.255",
            "128.0.0.1",
            "168.63.129.15",
            "172.15.255.255",
            "172.32.0.1",
            "192.0.1.1",
            "198.17.255.255",
            "198.20.0.1",
            "223.255.255.255",
            "::ffff:93.184.216.34",
            "64:ff9b::5db8:d822",
            "2002:5db8:d822::1",
            "2606:4700::1111",
            "2a00:1450:4001::8",
            "2001:4860:4860::8888",
            "2001:200::1",
        ] {
            assert_eq!(judged(address), Ok(()), "{address} must be allowed");
        }
    }

    #[test]
    fn an_allowed_range_is_reachable_in_every_notation_and_denial_wins() {
        let policy = EgressPolicy::parse("10.0.0.0/8, 127.0.0.1 fd00::/8", "10.9.0.0/16 93.184.216.0/24").unwrap();
        for (address, reachable) in [
            ("10.0.0.1", true),
            ("::ffff:10.0.0.1", true),
            ("64:ff9b::a00:1", true),
            ("127.0.0.1", true),
            ("127.0.0.2", false),
            ("fd00::1", true),
            ("fc00::1", false),
            ("10.9.0.1", false),
            ("::ffff:10.9.0.1", false),
            ("93.184.216.34", false),
            ("64:ff9b::5db8:d822", false),
            ("1.1.1.1", true),
        ] {
            assert_eq!(policy.check(address.parse().unwrap()).is_ok(), reachable, "{address}");
        }
    }

    #[test]
    fn a_denied_translator_prefix_closes_what_it_carries() {
        let policy = EgressPolicy::parse("", "64:ff9b::/96").unwrap();
        assert!(policy.check("64:ff9b::101:101".parse().unwrap()).is_err());
    }

    #[test]
    fn a_bad_range_is_named() {
        assert_eq!(
            EgressPolicy::parse("10.0.0.0/33", ""),
            Err("`10.0.0.0/33` is not a CIDR such as 10.0.0.0/8 or fd00::/8".to_owned())
        );
    }
}
