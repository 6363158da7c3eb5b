package bus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A cluster keeps a stream on several servers, and any of them answers direct gets and readers. A server that lags
// does not have the newest messages yet, and its "not there" would be wrong. So in a cluster, requests for what may
// be new go to the stream's leader, and a reader asks the leader whether it has seen everything.

// ErrNoLeader is returned when a stream of a cluster has no leader: its servers elect one,
// which takes some seconds, or too few of them are up for a majority.
var ErrNoLeader = errors.New("no leader: its servers elect one, or too few of them are up; start those that are down")

// codeNotAvailable is the server's answer while the cluster, or the one stream, has no leader.
const codeNotAvailable = 10008

func noLeader(err error) error {
	if api, ok := errors.AsType[*jetstream.APIError](err); ok && api.ErrorCode == codeNotAvailable {
		return fmt.Errorf("%w (%w)", ErrNoLeader, err)
	}
	return err
}

// ErrNoJetStream is returned when the server keeps no streams for this user: JetStream is off, or off for the account.
// A server that reloads its configuration switches it off for an account that it has no storage for.
var ErrNoJetStream = errors.New("the server has no JetStream for this user: start it with -js; if it has that, its " +
	"log says why, such as less disk than its accounts are promised; or js-domain or js-prefix is not that " +
	"of the streams")

func noJetStream(err error) error {
	if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrJetStreamNotEnabled) ||
		errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) {
		return fmt.Errorf("%w (%w)", ErrNoJetStream, err)
	}
	return err
}

const lagPause = 20 * time.Millisecond

func (b *Bus) clustered() bool { return b.nc.ConnectedClusterName() != "" }

func (b *Bus) leaderSubject(stream string) string { return b.api + "STREAM.MSG.GET." + stream }

// parseLeaderGet decodes the answer of a stream's leader to a get: a message, ErrNotFound, or another error.
func parseLeaderGet(stream string, resp *nats.Msg) (*Message, error) {
	var a struct {
		Error   *jetstream.APIError `json:"error"`
		Message *struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if len(resp.Data) == 0 && resp.Header.Get(headerStatus) == statusNoResponders {
		return nil, fmt.Errorf("%w %s", jetstream.ErrNoStreamResponse, stream)
	}
	if err := json.Unmarshal(resp.Data, &a); err != nil {
		return nil, fmt.Errorf("get: %w", err)
	}
	switch {
	case a.Error != nil && a.Error.ErrorCode == jetstream.JSErrCodeMessageNotFound:
		return nil, ErrNotFound
	case a.Error != nil:
		return nil, noLeader(a.Error)
	case a.Message == nil:
		return nil, errors.New("get: the answer has no message")
	}
	header := nats.Header{}
	if len(a.Message.Header) > 0 {
		var err error
		if header, err = nats.DecodeHeadersMsg(a.Message.Header); err != nil {
			return nil, fmt.Errorf("get: %w", err)
		}
	}
	return &Message{
		Subject: a.Message.Subject, Data: a.Message.Data, Header: header, Stream: stream, Seq: a.Message.Seq,
		Time: a.Message.Time,
	}, nil
}

// leaderHas reports whether the leader has a message that matches the filters (none: all) between two sequences. If
// so, a reader that found none has read from a server that lags. It returns false where this connection does not ask
// leaders.
func (b *Bus) leaderHas(ctx context.Context, stream string, filters []string, from, to uint64) (bool, error) {
	if !b.clustered() || from > to {
		return false, nil
	}
	if len(filters) == 0 {
		filters = []string{">"}
	}
	for _, filter := range filters {
		m, err := b.getMessage(ctx, stream, b.leaderSubject(stream), directRequest{Seq: max(1, from), NextFor: filter})
		switch {
		case errors.Is(err, ErrNotFound):
		case err != nil:
			return false, err
		case m.Seq <= to:
			return true, nil
		}
	}
	return false, nil
}

// leaderSeq returns the last sequence that the leader of a stream has; a complete read must reach it. It returns 0
// without a cluster: a single server does not lag.
func (b *Bus) leaderSeq(ctx context.Context, stream string) (uint64, error) {
	if !b.clustered() {
		return 0, nil
	}
	info, err := b.StreamInfo(ctx, stream)
	if err != nil {
		return 0, err
	}
	return info.State.LastSeq, nil
}

// readUpToDate is readPage, repeated until a server answers that has everything up to the sequence reached: servers
// of a cluster may lag.
func (b *Bus) readUpToDate(
	ctx context.Context, stream string, req directRequest, reached uint64,
) (page []*Message, upTo, pending uint64, err error) {
	for {
		err = b.retryWhileAway(ctx, func(ctx context.Context) (err error) {
			page, upTo, pending, err = b.readPage(ctx, stream, req)
			return err
		})
		if err != nil || upTo >= reached {
			return page, upTo, pending, err
		}
		if len(page) == 0 { // an empty page does not say how far the server is
			if lags, err := b.leaderHas(ctx, stream, req.MultiLast, 1, reached); err != nil || !lags {
				return nil, 0, 0, err
			}
		}
		if err := Pause(ctx, lagPause); err != nil {
			return nil, 0, 0, err
		}
	}
}
