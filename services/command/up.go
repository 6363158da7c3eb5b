package command

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/meander-rl/meander/pkg/auth"
	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/natsd"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/ui"
)

// upCommand makes the command 'meander up'.
func upCommand(a *app) *cobra.Command {
	s := defaultServices()
	listen, credentials := "127.0.0.1:4222", ""
	p := pageFlags{Config: ui.DefaultConfig(), prefix: "ui-"}
	c := &cobra.Command{
		Use:   "up",
		Short: "run the whole pipeline in this process until interrupted",
		Long: `up starts an embedded NATS server on the store, and the four services. It runs until it is
interrupted: the first Ctrl-C finishes the current work or gives it back, the second one ends the
process at once. Stored events are there at the next start.`,
		Example: `  meander up
  meander up --gc-above 80 --gc-age 48h    # frees the oldest closed groups, so that the store never fills up
  meander up --auth auth    # clients log in with the credentials of 'meander auth init auth'
  meander up --nats nats://a:4222,nats://b:4222,nats://c:4222 --stream-replicas 3    # uses a cluster, starts no server
  meander up --model ORG/NAME@REVISION    # of the Hugging Face Hub; downloaded once
  meander up --model synthetic --batch 16 --workers 2 --listen 127.0.0.1:4333
  meander publish --run demo 'a red sign that says "OPEN"'    # in another terminal`,
		RunE: func(c *cobra.Command, _ []string) error {
			if !c.Flags().Changed("log-level") {
				a.logLevel = envOr("MEANDER_LOG_LEVEL", "info")
			}
			s.Keep = true
			log := a.logger()
			if err := cmp.Or(checkAddress(c, "listen", listen, "4222"), s.validate(),
				p.resolveBeside(c.Flags(), s.Sampler.Model)); err != nil {
				return err
			}
			if a.nats.URL != "" && c.Flags().Changed("listen") {
				return usage(fmt.Errorf("--listen: %q; the server is %s; leave one of --listen and %s out", listen,
					bus.RedactURL(a.nats.URL), a.flag("nats")))
			}
			server := natsd.Options{Listen: listen}
			if c.Flags().Changed("auth") { // an empty one is refused: it would let in everybody
				if err := a.useCredentials(&server, &s, &p, credentials, log); err != nil {
					return err
				}
			}
			if err := a.fetchOwn(c.Context(), &s); err != nil {
				return err
			}
			conn, err := a.openConnection(c.Context(), natsd.MemberOptions{
				Options: server, ServesPipeline: true, Settings: s.settings,
				CheckSettings: func(running natsd.Info) error {
					return fmt.Errorf("a pipeline runs on store %q already: process %d", a.store, running.PID)
				},
			}, log, bus.Replicas(int(s.limits.StreamReplicas)))
			if err != nil {
				return err
			}
			defer conn.Close()
			if err := s.limits.Apply(c.Context(), conn.Bus); err != nil {
				return err
			}
			serve := func(ctx context.Context) error {
				watch, stop := context.WithCancel(ctx)
				defer stop()
				go watchFaults(watch, conn.Bus, func(line string) { log.Warn().Msg(line) })
				return p.serveBeside(ctx, conn, log, c.ErrOrStderr(), s.serve)
			}
			if conn.member == nil {
				return serve(c.Context())
			}
			a.sayUp(c, conn.member.ClientURL(), credentials != "")
			return conn.serveWhenOwner(c.Context(), serve)
		},
	}
	addSection(c.Flags(), pipelineSection, func(f *pflag.FlagSet) {
		f.StringVar(&listen, "listen", listen, "address for clients")
		f.StringVar(&credentials, "auth", "",
			"credentials folder (meander auth init): clients need its credentials, and TLS if it has certificates")
		f.BoolVar(&p.wanted, "ui", false, "also serve the page of 'meander ui'")
		p.add(f)
		pipelineFlags(f, &s)
	})
	addSection(c.Flags(), limitSection, s.limits.Flags)
	addSection(c.Flags(), gcSection, func(f *pflag.FlagSet) {
		s.bind().Register(f, append(gcRules, "gc_every")...)
	})
	return c
}

// sayUp says where the pipeline is, and how it is used in another terminal.
func (a *app) sayUp(c *cobra.Command, url string, auth bool) {
	fmt.Fprintf(c.ErrOrStderr(),
		"meander is up on %s, store %s\n  publish  meander publish%s --run demo 'a red sign that says \"OPEN\"'\n"+
			"  watch    meander watch%[3]s --run demo\n", url, a.store, a.whereToFind(c.Flags(), url, auth))
}

// whereToFind is the flag by which a command in another terminal finds this pipeline: none for the usual store and
// address.
func (a *app) whereToFind(f *pflag.FlagSet, url string, auth bool) string {
	switch {
	case f.Changed("store"):
		return " --store " + present.ShellWord(a.store)
	case f.Changed("listen") && !auth && a.nats.Token == "":
		return " --nats " + url
	}
	return ""
}

// useCredentials makes the embedded server accept only the users of a credentials folder. It gives s the certificate,
// and p the rights of a role. It is a usage error beside --nats or a token.
func (a *app) useCredentials(o *natsd.Options, s *services, p *pageFlags, dir string, log zerolog.Logger) error {
	switch {
	case a.nats.URL != "":
		return usage(fmt.Errorf("--auth: %q; the server is %s, with users of its own; leave one of --auth and "+
			"%s out", dir, bus.RedactURL(a.nats.URL), a.flag("nats")))
	case a.nats.Token != "":
		return usage(fmt.Errorf("--auth: given with a token, %s, which would let in everybody; leave one of "+
			"them out", a.flag("nats-token")))
	}
	f, err := openAuth(dir)
	if err != nil {
		return err
	}
	if s.certificate, err = f.Certificate(); err != nil {
		return err
	}
	if cert := s.certificate; cert != nil {
		const renew = "'meander auth update' makes a new one, for the next start"
		if expired := auth.CheckExpiry(cert, time.Now()); expired != nil {
			log.Error().Err(expired).Msg("no client elsewhere can connect; " + renew)
		} else if time.Until(cert.NotAfter) < auth.RenewBefore {
			log.Warn().Time("until", cert.NotAfter).Msg("the certificate of the server expires soon; " + renew)
		}
	}
	if p.wanted {
		if err := p.asRole(f); err != nil {
			return err
		}
	}
	o.Token = rand.Text() // of processes on the same store
	return addUsers(o, f)
}

// addUsers gives the embedded server the users and certificate of a credentials folder. It fails for a user whose role
// has no such rights.
func addUsers(o *natsd.Options, f *auth.Folder) error {
	for i := range f.Users {
		u := &f.Users[i]
		r, err := u.Rights()
		if err != nil {
			return err
		}
		o.Users = append(o.Users, natsd.User{
			Name: u.Name, Key: u.Key, Unlimited: r.Unlimited, Publish: r.Publish, DenyPublish: r.Deny,
			Subscribe: r.Subscribe,
			Answers:   r.Answers, AnswerWithin: r.AnswerWithin,
		})
	}
	if f.HasTLS() {
		o.TLS = &natsd.TLS{}
		o.TLS.Cert, o.TLS.Key = f.ServerFiles()
	}
	return nil
}

// pipelineFlags adds the flags of the services that run in this process, and keeps them in s.flags.
func pipelineFlags(to *pflag.FlagSet, s *services) {
	s.flags = pflag.NewFlagSet("services", pflag.ContinueOnError)
	s.flags.SortFlags = false
	s.bind().Register(s.flags,
		"model", "engine", "engine_patience", "engine_concurrency", "engine_adapters", "engine_mix", "adapter",
		"adapter_scale", "weights_dir", "resident_versions", "device", "dtype", "deterministic", "compile",
		"vae_tiling", "generic", "trust_class", "family", "network", "text_encoder_device", "threads", "batch",
		"workers", "share_prefixes", "replicas", "group_timeout", "scorers", "score_patience", "external_wait",
		"ack_wait")
	s.flags.StringVar(&s.metricsAddr, "metrics-addr", "",
		"host:port for /metrics (Prometheus), /healthz and /readyz, e.g. 127.0.0.1:9090; default none")
	to.AddFlagSet(s.flags)
}
