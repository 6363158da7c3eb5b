package bus_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// window is the number of unconfirmed messages of every asynchronous publisher here.
const window = 256

// BenchmarkPublish stores step events of one latent. The baseline, jetstream, is the
// client library's asynchronous publisher with one message encoded beforehand and sent
// again and again; jetstream-encoding encodes each and takes its digest, as bus must.
func BenchmarkPublish(b *testing.B) {
	for _, transport := range transports {
		for _, size := range []int{4 << 10, 64 << 10, 512 << 10} {
			name := fmt.Sprintf("transport=%s/size=%dKiB", transport, size>>10)
			b.Run("publisher=jetstream/"+name, func(b *testing.B) { benchJetStream(b, transport, size, false) })
			b.Run("publisher=jetstream-encoding/"+name, func(b *testing.B) { benchJetStream(b, transport, size, true) })
			b.Run("publisher=bus/"+name, func(b *testing.B) {
				e := benchEnv(b, transport)
				p := e.NewPublisher(window, 256<<20)
				defer p.Close()
				s := step("u1", 0, "a1", 0, size)
				b.SetBytes(int64(size))
				for i := 0; b.Loop(); i++ {
					s.UID, s.SampleIndex = uid(i/schemas.MaxGroupSize), int64(i%schemas.MaxGroupSize)
					if _, err := p.PublishStep(context.Background(), s, nil); err != nil {
						b.Fatal(err)
					}
				}
				if err := p.Flush(context.Background()); err != nil {
					b.Fatal(err)
				}
				if n := p.Stats().Retried; n > 0 {
					b.Errorf("%d messages were retried", n)
				}
			})
			b.Run("publisher=confirmed/"+name, func(b *testing.B) {
				e := benchEnv(b, transport)
				s := step("u1", 0, "a1", 0, size)
				b.SetBytes(int64(size))
				for i := 0; b.Loop(); i++ {
					s.UID, s.SampleIndex = uid(i/schemas.MaxGroupSize), int64(i%schemas.MaxGroupSize)
					if _, err := e.Publish(context.Background(), s); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func benchJetStream(b *testing.B, transport string, size int, encoding bool) {
	e := benchEnv(b, transport)
	js, err := jetstream.New(e.Conn(), jetstream.WithPublishAsyncMaxPending(window))
	if err != nil {
		b.Fatal(err)
	}
	s := step("u1", 0, "a1", 0, size)
	data, err := schemas.Encode(s)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(size))
	for b.Loop() {
		if encoding {
			if data, err = schemas.Encode(s); err != nil {
				b.Fatal(err)
			}
			_ = sha256.Sum256(data)
		}
		m := &nats.Msg{Subject: s.Subject(), Data: data, Header: nats.Header{
			"Nats-Msg-Id": {schemas.MessageID(s.Subject())}, "Mdr-Type": {"step/1"}, "Content-Type": {"application/msgpack"},
		}}
		if _, err := js.PublishMsgAsync(m, jetstream.WithStallWait(time.Minute)); err != nil {
			b.Fatal(err)
		}
		s.SampleIndex++
	}
	<-js.PublishAsyncComplete()
	js.CleanupPublisher()
}

// BenchmarkSubscription takes and acks small rewards, as the advantage service does.
func BenchmarkSubscription(b *testing.B) {
	for _, transport := range transports {
		b.Run("transport="+transport, func(b *testing.B) {
			e := benchEnv(b, transport)
			const n = 50_000
			p := e.NewPublisher(1024, 64<<20)
			for i := range n {
				r := reward(uid(i/schemas.MaxGroupSize), int64(i%schemas.MaxGroupSize))
				r.Group.Batch, r.Group.BatchGroups = "u1", 64
				if _, err := p.Publish(context.Background(), r); err != nil {
					b.Fatal(err)
				}
			}
			if err := p.Flush(context.Background()); err != nil {
				b.Fatal(err)
			}
			p.Close()
			round := 0
			var took time.Duration
			for b.Loop() {
				c := partition("u1")
				c.Name, c.Slots, c.AckWait, c.MaxAckPending = fmt.Sprintf("advantage-%d", round), 512, 30*time.Second,
					100_000
				round++
				began := time.Now()
				s, err := e.Subscription(context.Background(), c)
				if err != nil {
					b.Fatal(err)
				}
				for range n {
					m, err := s.Next(context.Background())
					if err != nil {
						b.Fatal(err)
					}
					if err := m.AckAsync(); err != nil {
						b.Fatal(err)
					}
				}
				took += time.Since(began)
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(n*round)/took.Seconds(), "messages/s")
		})
	}
}

// BenchmarkConsume has handlers ack steps, as the services do: few slots and many, small messages and large ones.
func BenchmarkConsume(b *testing.B) {
	for _, transport := range transports {
		for _, of := range []struct{ slots, kib, n int }{
			{1, 4, 10_000},
			{16, 4, 20_000},
			{256, 4, 20_000},
			{16, 512, 500},
		} {
			b.Run(fmt.Sprintf("transport=%s/slots=%d/size=%dKiB", transport, of.slots, of.kib), func(b *testing.B) {
				e := benchEnv(b, transport)
				p := e.NewPublisher(1024, 64<<20)
				for i := range of.n {
					s := step(uid(i), 0, "a1", 0, of.kib<<10)
					if _, err := p.PublishStep(context.Background(), s, nil); err != nil {
						b.Fatal(err)
					}
				}
				if err := p.Flush(context.Background()); err != nil {
					b.Fatal(err)
				}
				p.Close()
				rounds := 0
				for b.Loop() {
					ctx, stop := context.WithCancel(context.Background())
					var done atomic.Int64
					c := bus.ConsumerConfig{
						Durable: schemas.Durable{Stream: schemas.StreamSteps, Name: fmt.Sprintf("bench-%d", rounds)},
						Slots:   of.slots,
					}
					if err := e.Consume(ctx, c, func(context.Context, *bus.Message) error {
						if done.Add(1) == int64(of.n) {
							stop()
						}
						return nil
					}); err != nil {
						b.Fatal(err)
					}
					rounds++
				}
				b.ReportMetric(float64(of.n*rounds)/b.Elapsed().Seconds(), "messages/s")
			})
		}
	}
}

// BenchmarkRead replays 4 KiB steps.
func BenchmarkRead(b *testing.B) {
	for _, transport := range transports {
		b.Run("transport="+transport, func(b *testing.B) {
			e := benchEnv(b, transport)
			const n = 20_000
			p := e.NewPublisher(1024, 64<<20)
			for i := range n {
				if _, err := p.PublishStep(context.Background(), step("u1", int64(i), "a1", 0, 4<<10),
					nil); err != nil {
					b.Fatal(err)
				}
			}
			if err := p.Flush(context.Background()); err != nil {
				b.Fatal(err)
			}
			p.Close()
			rounds := 0
			for b.Loop() {
				got := 0
				for _, err := range e.Read(context.Background(), schemas.StreamSteps, nil, bus.ReadOptions{}) {
					if err != nil {
						b.Fatal(err)
					}
					got++
				}
				if got != n {
					b.Fatalf("read %d of %d", got, n)
				}
				rounds++
			}
			b.ReportMetric(float64(n*rounds)/b.Elapsed().Seconds(), "messages/s")
		})
	}
}

func benchEnv(b *testing.B, transport string) *env {
	b.Helper()
	e := newEnv(b, transport)
	e.setup(b)
	return e
}
