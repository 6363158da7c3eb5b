package doctor

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/counters"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
)

const (
	// slowAnswer is a longer round trip than a server in the same data centre has.
	slowAnswer = 50 * time.Millisecond
	// dialTimeout bounds the attempt to reach a server; lagPatience is how long one may be behind the others.
	dialTimeout = 2 * time.Second
	lagPatience = 3 * time.Second
	// leastPayload is the least payload limit that works: below it an event would need more parts than allowed.
	leastPayload = 256 << 10
	// nearlyFull is the share of a limit, in percent, from which there is a warning.
	nearlyFull = 80
)

// checkServer checks the connected server: its answer times, whether the connection is encrypted, and whether the
// other servers of its cluster are reached.
func checkServer(ctx context.Context, o *Options, say *notes) {
	nc := o.Bus.Conn()
	if len(o.Servers) > 1 {
		for _, err := range unreachable(ctx, o.Servers) {
			const fix = "start it, or name with --nats the servers that there are; a cluster without a majority " +
				"takes nothing"
			say.add(Fault, fix, "%v", err)
		}
	}
	rtt := time.Duration(1 << 62)
	for range 3 { // the best: this machine may be busy
		took, err := nc.RTT()
		if err != nil {
			say.addFailure("round trip", err)
			return
		}
		rtt = min(rtt, took)
	}
	say.ok("nats-server %s, %s, answers in %v", nc.ConnectedServerVersion(), o.Where, rtt.Round(10*time.Microsecond))
	if rtt > slowAnswer && !o.Own {
		say.add(Warning, "run samplers nearer to the server: each step is confirmed by it", "a round trip takes %v",
			rtt.Round(time.Millisecond))
	}
	state, err := nc.TLSConnectionState()
	if err != nil && remote(o) {
		say.add(Warning, "give the server a certificate, and clients its authority",
			"the connection to %s is not encrypted", nc.ConnectedAddr())
	}
	cert := o.Certificate
	if len(state.PeerCertificates) > 0 {
		cert = state.PeerCertificates[0]
	}
	checkCertificate(o, cert, say)
}

// checkCertificate checks when the server's certificate ends, if it has one.
func checkCertificate(o *Options, cert *x509.Certificate, say *notes) {
	if cert == nil {
		return
	}
	if expired := auth.CheckExpiry(cert, o.Now()); expired != nil {
		say.add(Fault, renewCertificate, "%v", expired)
	} else if cert.NotAfter.Sub(o.Now()) < auth.RenewBefore {
		say.add(Warning, renewCertificate, "the certificate of the server expires at %s",
			cert.NotAfter.UTC().Format(time.RFC3339))
	}
}

// unreachable dials the servers of a cluster and returns an error for each that does not answer.
func unreachable(ctx context.Context, servers []string) (out []error) {
	tried := make([]error, len(servers))
	var all sync.WaitGroup
	for i, address := range servers {
		all.Go(func() {
			c, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "tcp", address)
			if err == nil {
				err = c.Close()
			}
			tried[i] = err
		})
	}
	all.Wait()
	return slices.DeleteFunc(tried, func(err error) bool { return err == nil })
}

// remote reports whether the server is reached over a network.
func remote(o *Options) bool {
	host, _, _ := net.SplitHostPort(o.Bus.Conn().ConnectedAddr())
	ip := net.ParseIP(host)
	return ip != nil && !ip.IsLoopback()
}

// checkStreams checks the streams of the contract: present, as this build expects them, with space left, and
// replicated where the server is a cluster.
func checkStreams(ctx context.Context, o *Options, say *notes) {
	all, err := examine(ctx, o)
	if err != nil {
		say.addFailure("streams", err)
		return
	}
	reportLackingServers(all, say)
	good, missing := 0, []string{}
	alone := []string{}
	for _, s := range all {
		before := len(say.found)
		switch {
		case s.Missing:
			missing = append(missing, s.Name)
			continue
		case s.Err != nil:
			say.addFailure(s.Name, s.Err)
			continue
		case len(s.Wrong) > 0:
			say.add(Fault, "remove the stream, or use another account or store",
				"%s is not the stream of this contract: %s", s.Name, strings.Join(s.Wrong, "; "))
		case len(s.Stale) > 0:
			say.add(Warning, "start 'meander up' or meander-intake of this version, which puts it right",
				"%s is of another version: %s", s.Name, strings.Join(s.Stale, "; "))
		}
		if s.Peers > 1 && s.Replicas < 3 && !s.Mirror {
			alone = append(alone, s.Name)
		}
		reportFullness(&s, say)
		if len(say.found) == before && s.Current == s.Replicas {
			good++
		}
	}
	if len(missing) > 0 {
		say.add(Fault, "start 'meander up' or meander-intake again, which makes them",
			"%s not there: %s", present.Count(len(missing), "stream"), strings.Join(missing, ", "))
	}
	if len(alone) > 0 {
		say.add(Warning, "meander streams limit --stream-replicas 3",
			"the server is a cluster, and these are on one machine of it: %s", strings.Join(alone, ", "))
	}
	if good > 0 {
		say.ok("%s as this version expects, with room", present.Count(good, "stream"))
	}
}

// examine reads the states of the streams. While some servers of a cluster lag it asks again for a moment: they catch
// up.
func examine(ctx context.Context, o *Options) (all []bus.Examined, err error) {
	for end := time.Now().Add(min(lagPatience, o.Timeout/2)); ; {
		all, err = o.Bus.Examine(ctx, false)
		lags := slices.ContainsFunc(all, func(s bus.Examined) bool { return s.Current < s.Replicas })
		if err != nil || !lags || time.Now().After(end) {
			return all, err
		}
		if bus.Pause(ctx, lagPatience/10) != nil {
			return all, nil
		}
	}
}

// reportLackingServers reports servers of a cluster that should keep streams and do not have them.
func reportLackingServers(all []bus.Examined, say *notes) {
	lack, unknown := map[string]int{}, 0
	for _, s := range all {
		for _, server := range s.Lacking {
			lack[server]++
		}
		if s.Current+len(s.Lacking) < s.Replicas {
			unknown++
		}
	}
	const fix = "start it, or see its log: streams without a majority of their servers take nothing"
	for _, server := range slices.Sorted(maps.Keys(lack)) {
		say.add(Fault, fix, "server %s is down, or behind: %s of %d lack it", server,
			present.Count(lack[server], "stream"), len(all))
	}
	if unknown > 0 {
		say.add(Fault, "start the servers that are missing", "%s on fewer servers than configured",
			present.Count(unknown, "stream"))
	}
}

// reportFullness adds a fault or a warning about a stream whose limits are reached, or nearly.
func reportFullness(s *bus.Examined, say *notes) {
	switch {
	case s.Rolls:
	case s.State == bus.StateFull:
		what, fix := boot.Advise(bus.Fault{StreamStats: s.StreamStats})
		say.add(Fault, fix, "%s", what)
	default:
		if what, fix := boot.Scarce(&s.StreamStats); what != "" {
			say.add(Warning, fix, "%s", what)
		}
	}
}

// checkLimits checks the limits of the server and of the account: the size of messages, and the space used.
func checkLimits(ctx context.Context, o *Options, say *notes) {
	switch most := o.Bus.Conn().MaxPayload(); {
	case most < leastPayload:
		say.add(Fault, "raise max_payload of the server to 8MB", "the server takes messages of at most %s",
			boot.Bytes(most).Rough())
	default:
		say.ok("messages of at most %s", boot.Bytes(most).Rough())
	}
	account, err := o.Bus.JetStream().AccountInfo(ctx)
	if err != nil {
		say.addFailure("account", err)
		return
	}
	for _, of := range []struct {
		what, setting string
		used          uint64
		most          int64
	}{
		{"files", "max_file_store", account.Store, account.Limits.MaxStore},
		{"memory", "max_memory_store", account.Memory, account.Limits.MaxMemory},
	} {
		switch {
		case of.most < 0:
			say.ok("%s used in %s, without a limit of the account", orNothing(int64(of.used)), of.what)
		case of.most > 0 && 100*int64(of.used)/of.most >= nearlyFull:
			say.add(Warning, "raise "+of.setting+" of the server or account, or free some with 'meander gc'",
				"%s used in %s, of %s", orNothing(int64(of.used)), of.what, boot.Bytes(of.most).Rough())
		case of.most > 0:
			say.ok("%s used in %s, of %s", orNothing(int64(of.used)), of.what, boot.Bytes(of.most).Rough())
		}
	}
}

// checkDisk checks the free space for the server's files, where this process can see that disk.
func checkDisk(ctx context.Context, o *Options, say *notes) {
	if o.DiskFree == nil {
		say.add(Unchecked, "watch it there", "the disk of the server cannot be seen from here")
		return
	}
	free, err := o.DiskFree()
	if err != nil {
		say.addFailure("disk", err)
		return
	}
	const least = 256 << 20
	growth := int64(0)
	if o.Bus != nil {
		all, err := o.Bus.Examine(ctx, false)
		if err != nil {
			say.addFailure("space that the streams may still take", err)
		}
		for _, s := range all {
			growth += max(0, s.MaxBytes-int64(s.Bytes))
		}
	}
	switch {
	case free < least:
		say.add(Fault, "make room on the disk, or move the store (--store)", "%s are free for the store",
			boot.Bytes(free).Rough())
	case growth > free:
		say.add(Warning,
			"make room, lower the limits ('meander streams limit'), or have a janitor free what is old ('meander up "+
				"--gc-above 80')", "%s are free for the store, and the streams may take %s more",
			boot.Bytes(free).Rough(), boot.Bytes(growth).Rough())
	case o.Bus == nil:
		say.ok("%s are free for the store", boot.Bytes(free).Rough())
	default:
		say.ok("%s are free for the store, more than the streams may take", boot.Bytes(free).Rough())
	}
}

func orNothing(n int64) string {
	if n == 0 {
		return "nothing"
	}
	return boot.Bytes(n).Rough()
}

// fewRuns is how many runs have their counts compared: each is read in full.
const fewRuns = 3

// checkCounts compares the counts of runs with their events.
func checkCounts(ctx context.Context, o *Options, say *notes) {
	most := fewRuns
	if o.AllCounts {
		most = math.MaxInt
	}
	compared, differ, err := counters.Check(ctx, o.Bus, most)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		say.add(Unchecked, "", "the counts of runs: streams are not there")
		return
	}
	if err != nil {
		say.addFailure("counts", err)
		return
	}
	for _, run := range differ {
		say.add(Warning, fmt.Sprintf("nats kv del %s %s; the next look counts it from its events", schemas.CountBucket,
			counters.Key(run)), "the counts of run %s are not those of its events", run)
	}
	if len(differ) == 0 {
		say.ok("the counts of %s are those of their events", present.Count(compared, "run"))
	}
}
