# The NATS server of docker-compose.yml: the official image without root. A new volume
# takes the owner of /data from the image.
FROM nats:2.15.2-alpine
RUN mkdir /data && chown 65532:65532 /data
COPY deploy/nats.conf /etc/nats/nats.conf
USER 65532:65532
ENTRYPOINT ["nats-server"]
CMD ["--config", "/etc/nats/nats.conf"]
