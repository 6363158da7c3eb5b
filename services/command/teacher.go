package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/fields"
	"github.com/meander-rl/meander/pkg/models/hub"
	"github.com/meander-rl/meander/pkg/models/model"
	"github.com/meander-rl/meander/pkg/models/tensor/devices"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/teacher"
)

// teacherCommand makes the command 'meander teacher'.
func teacherCommand(a *app) *cobra.Command {
	cfg, metrics := teacher.DefaultConfig(), ""
	c := &cobra.Command{
		Use:   "teacher --model MODEL",
		Short: "give the log-probs of stored samples under another model: a teacher or a reference",
		Long: `teacher opens a model and answers on mdr.v1.teacher.NAME until it is interrupted. A request names a
stored sample of any run; the reply has the log-probs that this model gives it:

  texts   of each token that was generated, before temperature and filters (log_probs), and after those
          of the sample (processed_log_probs); with top_k also the likeliest tokens and their logits
  images  of the transition of each stochastic step whose states before and after are stored; with
          substeps also the mean velocity of so many finer steps inside each

Use it for on-policy distillation, for the divergence from a reference, and to score samples with
weights that did not draw them. The model needs the tokenizer of the samples, or the shape of their
latents; other samples are refused by name. The samplers are not involved: a teacher may start, stop
and run in replicas at any time. With its own weights a sample gets exactly its stored log-probs.`,
		Example: `  meander teacher --model sums
  meander teacher --model sums --adapter meander-out/learn-sums/seed-0/adapter --name better
  meander teacher --model ./base --name reference --nats nats://gpu-1:4222 --device cuda:0`,
		RunE: func(c *cobra.Command, given []string) error {
			cfg.EngineKey = engineKey(cfg.Engine)
			if err := cfg.Validate(); errors.Is(err, devices.ErrUnavailable) {
				return usage(err)
			} else if err != nil {
				return settingError(err)
			}
			if err := a.fetch(c.Context(), cfg.Model, cfg.Adapter, hub.Model); err != nil {
				return err
			}
			if !c.Flags().Changed("log-level") {
				a.logLevel = envOr("MEANDER_LOG_LEVEL", "info")
			}
			return a.withConnection(a.connect, func(c *cobra.Command, conn *connection, _ []string) error {
				return a.serveTeacher(c, conn, cfg, metrics)
			})(c, given)
		},
	}
	f := c.Flags()
	nameFlag(f, &cfg.Name, "name", "", "name that requests have for the teacher; default the model's")
	fields.Bind("", &cfg).Register(f, "model", "adapter", "adapter_scale", "engine", "device", "dtype",
		"deterministic", "threads", "workers")
	f.StringVar(&metrics, "metrics-addr", "", "host:port for /metrics (Prometheus), /healthz and /readyz; default none")
	return c
}

// serveTeacher answers requests until the command is interrupted. An unknown model or device is a usage error.
func (a *app) serveTeacher(c *cobra.Command, conn *connection, cfg teacher.Config, metrics string) error {
	log, instance := conn.log, boot.NewInstance()
	health := boot.NewHealth("teacher", instance)
	_, stop, err := health.Serve("--metrics-addr", metrics, log)
	if err != nil {
		return err
	}
	defer stop()
	health.Connected(conn.Bus)
	leave, err := boot.Announce(conn.Bus, "teacher", teacher.Summary, instance, log)
	if err != nil {
		return err
	}
	defer leave()
	cfg.Listening = func(name string) {
		health.SetReady(true)
		fmt.Fprintf(c.ErrOrStderr(), "teacher %s answers on %s at %s; Ctrl-C ends it\n", name,
			schemas.TeacherSubject(name), conn.where)
	}
	defer context.AfterFunc(c.Context(), func() { health.SetReady(false) })()
	err = teacher.Run(c.Context(), cfg, conn.Bus, log)
	if errors.Is(err, model.ErrUnknown) || errors.Is(err, devices.ErrUnavailable) {
		return usage(err)
	}
	return err
}
